"""Fields of requests that other servers understand and that would change the answer, but that are not supported.

Invariant: a client that sends one of them is refused, since it would take an answer for what it is not. It is told what
to send instead, if there is something.
"""

from collections.abc import Mapping

# By field, the values that change nothing. Some fields belong to completions or to chat alone.
UNSUPPORTED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "structured_outputs": (),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "store": (False,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "logprob_token_ids": (),
    "reasoning_effort": (),
    "thinking_token_budget": (-1,),
    "verbosity": ("medium",),
    "moderation": (),
    "repetition_detection": (),
    "watermarking": (False,),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "include_reasoning": (True,),
    "messages": (),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    "add_generation_prompt": (True,),
    "prompt": (),
    "best_of": (1,),
    "add_special_tokens": (False,),
    # SGLang's
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "stop_regex": ("", []),
    "no_stop_trim": (False,),
    "input_ids": (),
    "lora_path": (),
    "session_params": ({},),
    "extra_key": (),
    "custom_logit_processor": (),
    "custom_params": ({},),
    "reasoning": ({},),
    "return_hidden_states": (False,),
    "return_prompt_token_ids": (False,),
    "return_meta_info": (False,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    # Dynamo's
    "nvext": ({},),
}

_STRUCTURED = "there is no structured output"
_TEMPLATE = "in chat, chat_template_kwargs sets the variables of the model's template"
_NODES = "the router chooses the nodes of a request by itself"
_BIAS = "logit_bias makes single tokens likelier or less likely"
_TOKENS = "answers over gRPC have token ids"
_OF_CHAT = "it belongs to POST /v1/chat/completions"
_OF_COMPLETIONS = "it belongs to POST /v1/completions"
REMEDIES: Mapping[str, str] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format"), _STRUCTURED),
    **dict.fromkeys(("structural_tag", "structured_outputs", "regex", "ebnf", "json_schema"), _STRUCTURED),
    **dict.fromkeys(("reasoning_effort", "reasoning", "chat_template", "verbosity"), _TEMPLATE),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "logits_processors", "custom_logit_processor"), _BIAS),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), _TOKENS),
    **dict.fromkeys(("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"), _NODES),
    **dict.fromkeys(("messages", "add_generation_prompt"), _OF_CHAT),
    **dict.fromkeys(("prompt", "echo", "add_special_tokens"), _OF_COMPLETIONS),
    "chat_template_kwargs": _OF_CHAT,
    "input_ids": "in completions, prompt takes token ids",
    "no_stop_trim": "give include_stop_str_in_output",
    "truncate_prompt_tokens": "give a shorter prompt; POST /tokenize counts its tokens",
    "max_completion_tokens": "give max_tokens",
    "top_logprobs": "give their number as logprobs",
    "extra_key": "give cache_salt, which separates caches",
    "nvext": "give sampling fields, priority and cache_salt as fields of the body",
}
"""By field, what to do without it, as the end of a sentence."""
