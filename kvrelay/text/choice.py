"""One output sequence on its way to text: detokenised, and cut where it ends.

Invariant: the chunk with a finish reason is the last one; tokens after a stop string add nothing.
"""

from dataclasses import dataclass

from kvrelay.core.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.text.detokenizer import Detokenizer
from kvrelay.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextChunk:
    """What one message of tokens added to choice `index`.

    `text` may lag behind `token_ids` while characters or stop strings are incomplete. `text_offsets` (with logprobs)
    is where each token's text begins in the choice's text. `stop_reason` is the stop string or the stop token that
    ended the choice.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_offsets: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Choice:
    """One output sequence on its way to text."""

    __slots__ = ("_detokenizer", "_sampling", "ended_early", "finished", "last_token_time", "num_tokens")

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._detokenizer = Detokenizer(
            tokenizer.backend,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
        )
        self.num_tokens = 0
        self.finished = False
        self.ended_early = False  # by a stop string: its node goes on
        self.last_token_time: float | None = None

    def consume(self, output: TokenOutput) -> TextChunk:
        """The chunk for these tokens; those after a stop string are dropped."""
        detokenizer, sampling = self._detokenizer, self._sampling
        # The token that ended the sequence is no part of its text, unless asked for.
        num_text_tokens = len(output.token_ids)
        if output.stop_token_id is not None and not sampling.include_stop_str_in_output:
            num_text_tokens -= 1
        text = ""
        offsets: list[int] = []
        used = 0
        for token_id in output.token_ids:
            if output.logprobs:
                offsets.append(detokenizer.num_decoded_chars)
            used += 1
            self.num_tokens += 1
            if used <= num_text_tokens:
                text += detokenizer.push(token_id, check_stop=self.num_tokens > sampling.min_tokens)
                if detokenizer.stopped_by is not None:
                    break
        finish_reason, stop_reason = output.finish_reason, None
        if finish_reason is not None and detokenizer.stopped_by is None:
            text += detokenizer.flush()
            stop_reason = output.stop_token_id
        if detokenizer.stopped_by is not None:
            finish_reason = FinishReason.STOP
        self.finished = finish_reason is not None
        self.ended_early = self.finished and output.finish_reason is None
        return TextChunk(
            index=output.index,
            text=text,
            token_ids=output.token_ids[:used],
            logprobs=output.logprobs[:used],
            text_offsets=tuple(offsets),
            finish_reason=finish_reason,
            stop_reason=detokenizer.stopped_by or stop_reason,
        )
