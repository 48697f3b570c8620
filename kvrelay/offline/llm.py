"""`LLM`: batches of prompts on this machine, through the same engine that the nodes run.

Invariant: when `generate` or `chat` has returned or raised, a keyboard interrupt included, the engine holds no request.
"""

import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath

from kvrelay.core.config.option_types import (
    AttentionBackendName,
    DeviceName,
    DTypeName,
    KVCacheDType,
    Quantization,
)
from kvrelay.core.errors import InvalidRequestError, KVRelayError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.generation.token_ids import check_token_ids
from kvrelay.core.model.directory import resolve_model_directory
from kvrelay.core.model.limits import checked_sampling, room_for_output, sampling_of_prompt
from kvrelay.engine.kv_pool import allocate_pool
from kvrelay.engine.models.model_config import load_model_config
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.request import EngineRequest
from kvrelay.engine.startup import planned_device, prepare_engine
from kvrelay.engine.step_result import StepResult
from kvrelay.offline.interrupts import interrupts_held
from kvrelay.offline.progress_bar import progress_bar
from kvrelay.offline.prompts import Message, Prompt, chat_messages, conversations_of, prompts_of
from kvrelay.offline.request_output import PendingRequest, RequestOutput, results_of
from kvrelay.offline.torch_devices import devices_set_for
from kvrelay.text.tokenizer import Tokenizer


class LLM:
    """A model in this process.

        llm = LLM(model="./my-model")
        for result in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(result.outputs[0].text)

    `model` is a Hugging Face directory or the name of a cached one. The other arguments and their defaults are those of
    `kvrelay decode`, whose `--help` explains them; 0 leaves the choice to kvrelay. Raises ConfigurationError for an
    argument that cannot work, ModelLoadError for a model that cannot be run. Use it from one thread at a time.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        *,
        dtype: DTypeName = "auto",
        kv_cache_dtype: KVCacheDType = "auto",
        calculate_kv_scales: bool = False,
        quantization: Quantization = "none",
        threads: int = 0,
        attention_backend: AttentionBackendName = "auto",
        device: DeviceName = "auto",
        enforce_eager: bool = False,
        block_size: int = 16,
        num_blocks: int = 0,
        gpu_memory_utilization: float = 0.0,
        max_model_len: int = 0,
        max_num_seqs: int = 0,
        max_num_batched_tokens: int = 0,
        max_num_mixed_tokens: int = 0,
    ) -> None:
        options = EngineOptions(
            model=fspath(model),
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            calculate_kv_scales=calculate_kv_scales,
            quantization=quantization,
            threads=threads,
            attention_backend=attention_backend,
            device=device,
            enforce_eager=enforce_eager,
            block_size=block_size,
            num_blocks=num_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_mixed_tokens=max_num_mixed_tokens,
        )
        load_model_config(resolve_model_directory(options.model))  # first: a folder of something else has no tokenizer
        self.tokenizer = Tokenizer.load(options.model)
        planned = planned_device(options)
        with devices_set_for(planned):
            prepared = prepare_engine(options, planned)
            kv_pool = allocate_pool(prepared.layout, prepared.size.num_blocks, prepared.device)
            self._engine = prepared.build(kv_pool, retract=lambda block_ids: None, publish=False)
        self._device = prepared.device
        self.max_model_len = prepared.size.max_model_len
        self.vocab_size = prepared.loaded.config.vocab_size
        self._max_num_seqs = prepared.options.max_num_seqs
        self._in_use = threading.Lock()
        self._process = os.getpid()
        self._batches = itertools.count()  # late results of an interrupted batch must not count for the next

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Returns one RequestOutput per prompt, in order. `sampling_params` is one for all prompts or one for each;
        None means `SamplingParams()`. `progress` shows a bar on standard error.

        Raises InvalidRequestError, which names the prompt and the field, before anything is computed, and BatchError,
        with the results of the others, when prompts have failed."""
        given = prompts_of(prompts)
        encoded = [self._encode(prompt, number) for number, prompt in enumerate(given)]
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        return self._generate(texts, encoded, sampling_params, progress=progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Works like `generate`, but takes one conversation or several and applies the model's chat template."""
        texts = [self._rendered(conversation, number) for number, conversation in enumerate(conversations_of(messages))]
        encoded = [
            self._encode(text, number, field="messages", add_special_tokens=False) for number, text in enumerate(texts)
        ]
        return self._generate(texts, encoded, sampling_params, progress=progress)

    # -- before the engine -------------------------------------------------------------------------------------------

    def _rendered(self, conversation: Sequence[Message], number: int) -> str:
        """Returns the text that the chat template makes of a conversation. Raises InvalidRequestError."""
        try:
            return self.tokenizer.render_chat_now(chat_messages(conversation))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompt {number}: {error}", field=error.field) from error

    def _encode(
        self, prompt: str | list[int], number: int, *, field: str = "prompts", add_special_tokens: bool = True
    ) -> list[int]:
        """Returns the tokens of a prompt: at least one, few enough for the model's length, and all in the vocabulary.
        Raises InvalidRequestError."""
        try:
            token_ids = (
                self.tokenizer.encode_now(prompt, add_special_tokens=add_special_tokens)
                if isinstance(prompt, str)
                else prompt
            )
        except (TypeError, UnicodeError) as error:  # it has half of a surrogate pair
            raise InvalidRequestError(f"prompt {number} is not valid Unicode", field=field) from error
        if not token_ids:
            raise InvalidRequestError(f"prompt {number} has no tokens", field=field)
        room_for_output(len(token_ids), self.max_model_len, field=field, prompt=f"prompt {number}")
        # Texts too: a tokenizer may know more tokens than its model.
        check_token_ids(token_ids, self.vocab_size, field=field, name=f"prompt {number}")
        return token_ids

    def _generate(
        self,
        texts: Sequence[str | None],
        encoded: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        progress: bool,
    ) -> list[RequestOutput]:
        if os.getpid() != self._process:
            raise KVRelayError(
                "this LLM is of the process that this one was forked from, and its threads are not here: make an LLM "
                "in each process, and start them with multiprocessing's 'spawn' if the first one has used torch"
            )
        sampling = self._checked(_per_prompt(sampling_params, len(encoded)), encoded)
        pending = [
            PendingRequest(text, tuple(token_ids), one, self.tokenizer)
            for text, token_ids, one in zip(texts, encoded, sampling, strict=True)
        ]
        with interrupts_held() as handle_interrupts:
            if not self._in_use.acquire(blocking=False):
                raise KVRelayError("this LLM runs another batch: use it from one thread at a time")
            try:
                with devices_set_for(self._device):
                    self._run(pending, handle_interrupts, progress=progress)
            finally:
                self._in_use.release()
        return results_of(pending)

    def _checked(self, given: Sequence[SamplingParams], encoded: Sequence[list[int]]) -> list[SamplingParams]:
        """Returns the sampling of each prompt with a seed, and with `max_tokens` and `min_tokens` lowered to what the
        model's length leaves after the prompt. Raises InvalidRequestError."""
        checked: dict[int, SamplingParams] = {}  # by the identity of those given, which most prompts share
        found: list[SamplingParams] = []
        limits = {"vocab_size": self.vocab_size, "max_num_seqs": self._max_num_seqs}
        for number, (one, token_ids) in enumerate(zip(given, encoded, strict=True)):
            room = self.max_model_len - len(token_ids)
            try:
                if id(one) not in checked:
                    checked[id(one)] = checked_sampling(one, **limits)
                sampling = sampling_of_prompt(checked[id(one)], max_tokens=checked[id(one)].max_tokens)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {number}: {error}", field=error.field) from None
            max_tokens, min_tokens = min(sampling.max_tokens, room), min(sampling.min_tokens, room)
            found.append(replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens))
        return found

    # -- the engine --------------------------------------------------------------------------------------------------

    def _run(self, pending: Sequence[PendingRequest], handle_interrupts: Callable[[], None], *, progress: bool) -> None:
        batch = next(self._batches)
        under_way = {f"{batch}.{number}": one for number, one in enumerate(pending)}
        bar = progress_bar(len(pending), shown=progress)
        num_tokens = 0
        try:
            for request_id, one in under_way.items():
                self._engine.add(EngineRequest(request_id, one.prompt_token_ids, one.sampling))
            while under_way:
                handle_interrupts()
                result, busy = self._engine.step()
                assert result is not None or busy, "requests are left, but no step changes anything"
                if result is None:
                    continue  # a chunk of a prompt that fills no block has no result
                num_tokens += self._take(result, under_way)
                changed = [item.request_id for item in result.outputs] + [one.request_id for one in result.failures]
                for request_id in dict.fromkeys(changed):
                    if request_id not in under_way or not under_way[request_id].ended:
                        continue
                    del under_way[request_id]
                    rate = num_tokens / max(bar.format_dict["elapsed"], 1e-9)
                    bar.set_postfix_str(f"{rate:.1f} output tokens/s", refresh=False)
                    bar.update()
        finally:
            for request_id in under_way:
                self._engine.abort(request_id)
            self._engine.threads.rest()
            bar.close()

    def _take(self, result: StepResult, under_way: Mapping[str, PendingRequest]) -> int:
        """Returns the number of new output tokens. Ends outputs that a stop string has ended in the engine, too."""
        for failure in result.failures:
            if (one := under_way.get(failure.request_id)) is not None:
                one.failure = failure.message
        for prompt in result.prompts:
            if (one := under_way.get(prompt.request_id)) is not None:
                one.prompt_logprobs = tuple(prompt.prompt_logprobs)
                one.num_cached_tokens = prompt.num_cached_tokens
        num_tokens = 0
        for item in result.outputs:
            if (one := under_way.get(item.request_id)) is not None:
                num_tokens += one.take(item.output)
                if one.ended_early(item.output.index):
                    self._engine.finish(item.request_id, item.output.index)
        return num_tokens


def _per_prompt(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    wanted = "sampling_params must be a SamplingParams or a list of them"
    if not isinstance(given, Sequence):
        raise InvalidRequestError(f"{wanted}, got {given!r}", field="sampling_params")
    for number, one in enumerate(given):
        if not isinstance(one, SamplingParams):
            raise InvalidRequestError(f"{wanted}, got {one!r} for prompt {number}", field="sampling_params")
    if len(given) != count:
        raise InvalidRequestError(f"{len(given)} sampling_params for {count} prompts", field="sampling_params")
    return list(given)
