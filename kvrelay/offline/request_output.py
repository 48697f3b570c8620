"""What `LLM.generate` returns, and how it is collected from the engine's results."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.core.errors import KVRelayError
from kvrelay.core.generation.outputs import TokenLogprobs, TokenOutput
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.text.choice import Choice
from kvrelay.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One output of a prompt. `finish_reason` is "stop" or "length". `stop_reason` is the stop string or the token that
    ended the output, None if its length did. `logprobs` has one entry per token if they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its `n` outputs, by index. `prompt` is None if token ids were given. `num_cached_tokens` counts the
    prompt's tokens that the prefix cache had."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0


class BatchError(KVRelayError):
    """Prompts of a batch have failed, and the message names the first. All others have run to their end: `results` has
    one RequestOutput per prompt, in order, and None for each that failed."""

    def __init__(self, message: str, *, results: Sequence[RequestOutput | None] = ()) -> None:
        super().__init__(message)
        self.results = results


@dataclass(slots=True)
class _PendingOutput:
    choice: Choice
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None


class PendingRequest:
    """A prompt whose outputs are being computed. The engine's caller sets `prompt_logprobs` and `num_cached_tokens`
    when the engine reports them, and `failure` if the prompt fails."""

    def __init__(
        self, prompt: str | None, prompt_token_ids: tuple[int, ...], sampling: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.sampling = sampling
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.num_cached_tokens = 0
        self.failure: str | None = None
        self._outputs = [_PendingOutput(Choice(tokenizer, sampling, prompt_token_ids)) for _ in range(sampling.n)]

    @property
    def ended(self) -> bool:
        return self.failure is not None or all(output.choice.finished for output in self._outputs)

    def ended_early(self, index: int) -> bool:
        """Tells whether a stop string has ended an output, which the engine does not know."""
        return self._outputs[index].choice.ended_early

    def take(self, new: TokenOutput) -> int:
        """Adds new tokens. Returns how many of them count: those after a stop string do not."""
        output = self._outputs[new.index]
        if output.choice.finished:
            return 0
        chunk = output.choice.consume(new)
        output.text.append(chunk.text)
        output.token_ids.extend(chunk.token_ids)
        output.logprobs.extend(chunk.logprobs)
        if chunk.finish_reason is not None:
            output.finish_reason = chunk.finish_reason.value
            output.stop_reason = chunk.stop_reason
        return len(chunk.token_ids)

    def result(self) -> RequestOutput:
        """Returns the prompt with its outputs. Call it only when it has `ended` and not failed."""
        outputs = tuple(
            CompletionOutput(
                index=index,
                text="".join(output.text),
                token_ids=tuple(output.token_ids),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                logprobs=tuple(output.logprobs),
            )
            for index, output in enumerate(self._outputs)
        )
        return RequestOutput(self.prompt, self.prompt_token_ids, outputs, self.prompt_logprobs, self.num_cached_tokens)


def results_of(pending: Sequence[PendingRequest]) -> list[RequestOutput]:
    """Returns the results of prompts that have all ended. Raises BatchError if some have failed."""
    failures = [f"prompt {number}: {one.failure}" for number, one in enumerate(pending) if one.failure is not None]
    if failures:
        message = failures[0] if len(failures) == 1 else f"{failures[0]} ({len(failures)} of {len(pending)} failed)"
        raise BatchError(message, results=[one.result() if one.failure is None else None for one in pending])
    return [one.result() for one in pending]
