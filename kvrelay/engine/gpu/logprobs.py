"""Log-probabilities on a GPU, enqueued with a step and read when it is collected.

Invariant: they equal those of `sampling.logprobs` up to the rounding of a log-softmax.
Ranks and most likely tokens are exactly equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.engine.gpu.packed_arrays import to_host


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """Log-probabilities in host tensors with one entry per row, valid once the step has ended. `num_top[i]` is how many
    of row i's most likely tokens are wanted."""

    num_top: tuple[int, ...]
    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor  # [num_rows, largest of num_top]
    top_logprobs: Tensor

    def collect(self) -> list[TokenLogprobs]:
        columns = (self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        rows = zip(*(column.tolist() for column in columns), self.num_top, strict=True)
        return [
            TokenLogprobs(token_id, logprob, rank, tuple(zip(top_ids[:k], top_logprobs[:k], strict=True)))
            for token_id, logprob, rank, top_ids, top_logprobs, k in rows
        ]

    def columns(self) -> PromptLogprobs:
        """Returns those of consecutive tokens of a prompt."""
        return PromptLogprobs.of_bytes(
            _bytes(self.token_ids, np.uint32),
            _bytes(self.logprobs, np.float32),
            _bytes(self.ranks, np.uint32),
            _bytes(self.top_ids, np.uint32),
            _bytes(self.top_logprobs, np.float32),
        )


def launch_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> LaunchedLogprobs:
    """Enqueues the log-probabilities of `token_ids`, `[num_rows]` int64, under `logits`, `[num_rows, vocab_size]`
    float32. Ids below 0 count as 0. Among equals lower ids come first, and tokens as likely as the given one do not
    count against its rank."""
    chosen = token_ids.clamp(min=0)[:, None]
    logprobs = logits.log_softmax(dim=-1)
    ranks = (logits > logits.gather(1, chosen)).sum(dim=-1) + 1
    top_ids = _most_likely(logits, max(num_top, default=0))
    return LaunchedLogprobs(
        tuple(num_top),
        to_host(chosen.squeeze(1)),
        to_host(logprobs.gather(1, chosen).squeeze(1)),
        to_host(ranks),
        to_host(top_ids),
        to_host(logprobs.gather(1, top_ids)),
    )


def _bytes(column: Tensor, dtype: type[np.uint32] | type[np.float32]) -> bytes:
    found: bytes = column.numpy().astype(dtype).tobytes()
    return found


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """Returns the ids of the `count` largest logits of each row, `[num_rows, count]`, lower ids first among equals.

    `topk` promises no order among equals, and a stable sort of all logits takes several times their memory. It
    therefore compares integers made of the logit, mapped to an integer of the same order, and the id."""
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    bits = (logits + 0.0).view(torch.int32)  # makes -0 equal to 0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys <<= 32
    last = logits.shape[1] - 1
    keys |= torch.arange(last, -1, -1, device=logits.device)
    return last - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
