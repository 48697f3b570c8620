"""Bodies of the OpenAI API: what is read of a wrong one."""

import codecs
import gc
import json
from contextlib import nullcontext

import pytest
from pydantic import ValidationError

from kvrelay.core.errors import InvalidRequestError
from router.edge.openai_schema import Body, ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from router.edge.unsupported_fields import REMEDIES, UNSUPPORTED_FIELDS
from router.edge.validation import MAX_MESSAGES

MESSAGE = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("cls", "field", "values", "num_errors"),
    [
        (CompletionBody, "stop", [5] * 1000, 2),  # one of them: it is no string either
        (CompletionBody, "stop_token_ids", ["5"] * 1000, 1),
        (ChatBody, "messages", [5] * 1000, 1),
        (ChatBody, "messages", [MESSAGE] * MAX_MESSAGES + [{}] * 1000, 1),
    ],
)
def test_a_list_is_read_up_to_its_first_wrong_element(
    cls: type[GenerationBody], field: str, values: list[object], num_errors: int
) -> None:
    """Each error costs a kilobyte and microseconds, and a body has room for millions of elements."""
    with pytest.raises(ValidationError) as refused:
        cls.model_validate_json(json.dumps({field: values}))
    assert refused.value.error_count() == num_errors
    with pytest.raises(InvalidRequestError, match=field):
        cls.parse(json.dumps({field: values}).encode())


@pytest.mark.parametrize("wrong", ["1", True, None, []])
def test_biases_are_read_up_to_the_first_wrong_one(wrong: object) -> None:
    body = CompletionBody.parse(json.dumps({"logit_bias": {"5": 1, "6": wrong, "no id": 1}}).encode())
    with pytest.raises(InvalidRequestError, match="the bias of '6' is not a number") as refused:
        body.sampling(logprobs=None)
    assert refused.value.field == "logit_bias"


@pytest.mark.parametrize("more", [{}, {"tools": [5]}, {"n": "1"}])
def test_no_garbage_is_looked_for_while_a_body_becomes_objects(more: dict[str, object]) -> None:
    """With each quarter that there is more of them, the collector would look at all of them again."""
    phases: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    data = json.dumps({"prompt": "hello", "ignored": [[]] * 100_000, **more}).encode()
    gc.callbacks.append(note)
    try:
        with pytest.raises(InvalidRequestError) if more else nullcontext():
            body = CompletionBody.parse(data)
            assert body.prompt == "hello" and not body.model_extra
        num_phases = len(phases)
    finally:
        gc.callbacks.remove(note)
    assert num_phases <= 4, "one or two collections before or after it"
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("field", "value", "harmless"),
    [
        ("reasoning_effort", "none", None),
        ("verbosity", "low", "medium"),
        ("moderation", {"model": "omni-moderation-latest"}, None),
        ("thinking_token_budget", 100, -1),
        ("repetition_detection", {"max_pattern_size": 8}, None),
        ("logprob_token_ids", [5], None),
        ("watermarking", True, False),
        ("return_prompt_text", True, False),
        ("vllm_xargs", {"x": 1}, {}),
        ("regex", "[0-9]+", None),
        ("ebnf", "root ::= [0-9]", None),
        ("json_schema", "{}", None),
        ("stop_regex", "[0-9]", ""),
        ("no_stop_trim", True, False),
        ("input_ids", [5], None),
        ("lora_path", "adapter", None),
        ("session_params", {"id": "1"}, {}),
        ("extra_key", "tenant", None),
        ("custom_logit_processor", "{}", None),
        ("custom_params", {"x": 1}, {}),
        ("reasoning", {"effort": "low"}, {}),
        ("return_hidden_states", True, False),
        ("return_prompt_token_ids", True, False),
        ("return_meta_info", True, False),
        ("nvext", {"ignore_eos": True}, {}),
        ("kv_transfer_params", {"do_remote_decode": True}, {}),
        ("bootstrap_host", "10.0.0.2", None),
        ("bootstrap_port", 8998, None),
        ("bootstrap_room", 1, None),
        ("include_reasoning", False, True),
    ],
)
def test_what_would_change_an_answer_is_not_ignored(field: str, value: object, harmless: object) -> None:
    for cls, body in ((CompletionBody, {"prompt": "hello"}), (ChatBody, {"messages": [MESSAGE]})):
        cls.parse(json.dumps(body | {field: harmless}).encode())
        with pytest.raises(InvalidRequestError, match=f"^{field} is not supported") as refused:
            cls.parse(json.dumps(body | {field: value}).encode())
        assert refused.value.field == field


@pytest.mark.parametrize(
    ("cls", "field", "value", "remedy"),
    [
        (CompletionBody, "messages", [MESSAGE], "it belongs to POST /v1/chat/completions"),
        (CompletionBody, "chat_template_kwargs", {"x": 1}, "it belongs to POST /v1/chat/completions"),
        (CompletionBody, "max_completion_tokens", 5, "give max_tokens"),
        (CompletionBody, "top_logprobs", 5, "give their number as logprobs"),
        (CompletionBody, "guided_json", {}, "there is no structured output"),
        (ChatBody, "response_format", {"type": "json_object"}, "there is no structured output"),
        (ChatBody, "prompt", "hello", "it belongs to POST /v1/completions"),
        (
            ChatBody,
            "reasoning_effort",
            "low",
            "in chat, chat_template_kwargs sets the variables of the model's template",
        ),
        (TokenizeBody, "reasoning", {"effort": "low"}, "chat_template_kwargs"),
        (CompletionBody, "bad_words", ["no"], "logit_bias"),
        (CompletionBody, "input_ids", [5], "prompt takes token ids"),
        (ChatBody, "no_stop_trim", True, "give include_stop_str_in_output"),
        (ChatBody, "nvext", {"top_k": 5}, "give sampling fields, priority and cache_salt as fields of the body"),
        (ChatBody, "extra_key", "tenant", "give cache_salt"),
        (ChatBody, "kv_transfer_params", {"remote_host": "x"}, "the router chooses the nodes of a request by itself"),
    ],
)
def test_a_refusal_says_what_to_do_instead(cls: type[Body], field: str, value: object, remedy: str) -> None:
    body: dict[str, object] = {"messages": [MESSAGE]} if cls is ChatBody else {"prompt": "hello"}
    with pytest.raises(InvalidRequestError, match=f"^{field} is not supported here: .*{remedy}"):
        cls.parse(json.dumps(body | {field: value}).encode())


def test_remedies_are_those_of_fields_that_are_refused() -> None:
    assert set(REMEDIES) <= set(UNSUPPORTED_FIELDS)


def test_a_chat_without_messages_is_refused_for_the_prompt_that_it_has_instead() -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt is not supported here: it belongs to POST /v1/completions"):
        ChatBody.parse(b'{"prompt": "hello"}')
    with pytest.raises(InvalidRequestError, match=r"^messages is required$") as refused:
        ChatBody.parse(b"{}")
    assert refused.value.field == "messages"


def test_a_byte_order_mark_is_no_part_of_a_body() -> None:
    body = json.dumps({"prompt": "\ufeffhello"}, ensure_ascii=False).encode()
    assert CompletionBody.parse(codecs.BOM_UTF8 + body).prompt == "\ufeffhello"
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        CompletionBody.parse(codecs.BOM_UTF8 * 2 + body)


@pytest.mark.parametrize(
    ("cls", "body"),
    [(CompletionBody, {}), (ChatBody, {"messages": [MESSAGE]}), (TokenizeBody, {}), (DetokenizeBody, {"tokens": []})],
)
def test_an_empty_model_is_the_one_that_is_served(cls: type[Body], body: dict[str, object]) -> None:
    for given, found in (("", None), (None, None), (" ", " ")):
        assert cls.parse(json.dumps(body | {"model": given}).encode()).model == found


def test_best_of_is_compared_with_n() -> None:
    CompletionBody.parse(b'{"prompt": "hello", "n": 2, "best_of": 2}')
    with pytest.raises(InvalidRequestError, match=r"^best_of is only supported when it equals n"):
        CompletionBody.parse(b'{"prompt": "hello", "n": 2, "best_of": 1}')


@pytest.mark.parametrize("name", ["tool_calls", "function_call", "audio"])
def test_a_message_without_content_is_refused_for_what_it_has_instead(name: str) -> None:
    message = {"role": "assistant", "content": None, name: [{"id": "1"}]}
    with pytest.raises(InvalidRequestError, match=rf"^messages\[1\]: {name} is not supported"):
        ChatBody.parse(json.dumps({"messages": [MESSAGE, message]}).encode())


def test_what_frameworks_send_and_changes_no_answer_is_ignored() -> None:
    message: dict[str, object] = {**MESSAGE, "name": "ann", "refusal": None, "tool_calls": None, "annotations": []}
    fields = {
        "user": "ann",
        "metadata": {"session": "1"},
        "service_tier": "auto",
        "safety_identifier": "ann",
        "prompt_cache_key": "chat",
        "parallel_tool_calls": True,
        "request_id": "1",
        "spaces_between_special_tokens": True,
        "tools": None,
        "store": False,
    }
    assert ChatBody.parse(json.dumps({"messages": [message], **fields}).encode()).chat_prompt().messages == [MESSAGE]
