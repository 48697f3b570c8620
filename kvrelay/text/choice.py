"""The text of one output sequence: its tokens are detokenised, and cut where a stop string ends it.

Invariant: the chunk with a finish reason is the last one. Tokens after a stop string add nothing.
"""

from collections.abc import Sequence

from kvrelay.core.generation.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.record import record
from kvrelay.text.detokenizer import Detokenizer
from kvrelay.text.tokenizer import Tokenizer


@record
class TextChunk:
    """What one message of tokens has added to choice `index`.

    `text` lags behind `token_ids` while a character or a possible stop string is incomplete. `text_offsets` (only with
    `logprobs`) has, for each token, where its text begins in the choice's text. `stop_reason` is the stop string or the
    stop token that ended the choice.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_offsets: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Choice:
    """One output sequence: its detokenizer, and how far it has come."""

    __slots__ = ("_detokenizer", "_num_tokens", "_sampling", "ended_early", "finished")

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._sampling = sampling
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids=prompt_token_ids,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
        )
        self._num_tokens = 0
        self.finished = False
        self.ended_early = False  # by a stop string, so its node is still decoding

    def consume(self, output: TokenOutput) -> TextChunk:
        """Returns the chunk for these tokens, without those after a stop string."""
        detokenizer, sampling = self._detokenizer, self._sampling
        # The token that ended the sequence is not part of its text, unless the request includes it.
        num_text_tokens = len(output.token_ids)
        if output.stop_token_id is not None and not sampling.include_stop_str_in_output:
            num_text_tokens -= 1
        text = ""
        offsets: list[int] = []
        used = 0
        for token_id in output.token_ids:
            if output.logprobs:
                offsets.append(detokenizer.start_of(token_id))
            used += 1
            self._num_tokens += 1
            if used <= num_text_tokens:
                text += detokenizer.push(token_id, check_stop=self._num_tokens > sampling.min_tokens)
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
