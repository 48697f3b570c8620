"""The requests of one HTTP call, one for each prompt, as one OpenAI response, whole or streamed.

Invariant: choice `c` of prompt `p` has index `p * n + c`. Closing the stream aborts every request.
"""

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from kvrelay.core.errors import InvalidRequestError, KVRelayError
from kvrelay.core.generation.outputs import FinishReason
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.text.choice import TextChunk
from router.edge.echo import encoded_logprobs
from router.edge.edge import Edge, GenerationEvent
from router.edge.fan_in import merged
from router.edge.openai_errors import error_body
from router.edge.openai_format import (
    DONE,
    Echo,
    Envelope,
    Format,
    StreamFormatter,
    Usage,
    WholeChoice,
    event,
    whole_response,
)
from router.edge.prompt_logprobs import encoded_prompt_logprobs
from router.request import RequestTrace, RoutedRequest

_logger = logging.getLogger(__name__)
# Of the outputs of one response that is not streamed. With 20 log-probabilities for each token of 128 long outputs, it
# would otherwise have more than a gigabyte.
MAX_WHOLE_BYTES = 2**26


class HttpGeneration:
    """The generation of one response, run once, by `whole` or `stream`. `requests` differ only in their prompts and
    ids. `echoes` are the prompts if they are repeated before their outputs; `only_echoes` then leaves out the outputs,
    which have one token each."""

    def __init__(
        self,
        edge: Edge,
        requests: Sequence[RoutedRequest],
        answer_format: Format,
        envelope: Envelope,
        *,
        echoes: Sequence[Echo],
        only_echoes: bool,
    ) -> None:
        self._edge = edge
        self._echoes = echoes
        self._only_echoes = only_echoes
        self._requests = requests
        self._format = answer_format
        self._envelope = envelope
        self._n = requests[0].sampling.n
        self._stop_token_ids = frozenset(requests[0].sampling.stop_token_ids)
        self._usage = Usage(prompt_tokens=sum(len(request.prompt_token_ids) for request in requests))

    async def whole(self) -> bytes:
        """Returns the encoded response. Raises InvalidRequestError if that gets too long."""
        beginnings = [[echo.text] for echo in self._echoes] or [[] for _ in self._requests]
        choices = [WholeChoice(self._format, list(beginning)) for beginning in beginnings for _ in range(self._n)]
        prompt_logprobs: dict[int, bytes] = {}
        num_bytes = 0
        async with aclosing(self._events()) as events:
            async for prompt_index, found in events:
                if isinstance(found, TextChunk):
                    chunk = self._behind_echo(prompt_index, found)
                    num_bytes += choices[prompt_index * self._n + chunk.index].add(chunk, self._count(chunk))
                    if num_bytes > MAX_WHOLE_BYTES:
                        raise self._too_long()
                elif isinstance(found, RequestTrace):
                    self._usage.traces[prompt_index] = found
                elif self._echoes_logprobs:
                    await self._echo(prompt_index, found)
                    for choice in choices[prompt_index * self._n : (prompt_index + 1) * self._n]:
                        choice.begin_with(self._echoes[prompt_index])
                else:
                    prompt_logprobs[prompt_index] = await encoded_prompt_logprobs(self._edge.tokenizer, found)
        return await whole_response(self._format, self._envelope, choices, self._n, self._usage, prompt_logprobs)

    async def stream(self, *, include_usage: bool, continuous_usage: bool) -> AsyncGenerator[bytes, None]:
        """Yields server-sent events. Raises only before the first one; a later failure becomes the last event.
        `include_usage`: the last one has the usage; `continuous_usage`: all of them have that so far."""
        formatter = StreamFormatter(self._format, self._envelope, include_usage=include_usage)
        started = False
        try:
            async with aclosing(self._events()) as events:
                async for prompt_index, found in events:
                    if isinstance(found, TextChunk):
                        chunk = self._behind_echo(prompt_index, found)
                        index = prompt_index * self._n + chunk.index
                        stop_reason = self._count(chunk)
                        echo = self._echoes[prompt_index] if self._echoes else None
                        if continuous_usage:
                            formatter.show(self._usage)
                        if data := formatter.chunk(index, echo, chunk, stop_reason):
                            started = True
                            yield data
                    elif isinstance(found, RequestTrace):
                        self._usage.traces[prompt_index] = found
                    elif self._echoes_logprobs:
                        await self._echo(prompt_index, found)
            yield formatter.usage(self._usage) + DONE if include_usage else DONE
        except KVRelayError as error:
            if not started:
                raise
            yield event(error_body(error))
        except Exception:
            if not started:
                raise
            # The status has been sent already, so only an event can tell the client.
            _logger.exception("stream %s failed", self._envelope.response_id)
            yield event(error_body(KVRelayError("internal error")))

    def _too_long(self) -> InvalidRequestError:
        """Returns the error to raise. The requests count as aborted, as those of a list do of which one has failed."""
        return InvalidRequestError(
            f"the answer has more than {MAX_WHOLE_BYTES} bytes: ask for a stream, or for less with logprobs, n or "
            "max_tokens",
            field="max_tokens" if self._requests[0].sampling.logprobs is None else "logprobs",
        )

    def _events(self) -> AsyncGenerator[tuple[int, GenerationEvent], None]:
        return merged([self._edge.generate(request) for request in self._requests])

    @property
    def _echoes_logprobs(self) -> bool:
        return bool(self._echoes) and self._requests[0].sampling.logprobs is not None

    async def _echo(self, prompt_index: int, found: PromptLogprobs) -> None:
        echo, token_ids = self._echoes[prompt_index], self._requests[prompt_index].prompt_token_ids
        echo.logprobs = await encoded_logprobs(self._edge.tokenizer, echo, token_ids, found)

    def _behind_echo(self, prompt_index: int, chunk: TextChunk) -> TextChunk:
        """Returns a chunk as it follows the repeated prompt, if there is one."""
        if not self._echoes:
            return chunk
        if self._only_echoes:
            return TextChunk(chunk.index, "", (), finish_reason=FinishReason.LENGTH)
        start = len(self._echoes[prompt_index].text)
        return replace(chunk, text_offsets=tuple(start + offset for offset in chunk.text_offsets))

    def _count(self, chunk: TextChunk) -> str | int | None:
        """Counts the chunk's tokens. Returns the stop reason as OpenAI clients know it: None for the model's own end
        token."""
        self._usage.completion_tokens += len(chunk.token_ids)
        reason = chunk.stop_reason
        return reason if isinstance(reason, str) or reason in self._stop_token_ids else None
