"""Log-probabilities of tokens and of the most likely ones beside them, from unmodified logits.

Invariant: those of a row do not depend on other rows. Compiled kernels and torch give the same ranks and the same most
likely tokens, and log-probabilities that differ by rounding.
"""

from array import array
from collections.abc import Iterator, Sequence

import torch
from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.threads import num_threads
from torch import Tensor

from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.engine.sampling.truncation import most_likely

PROMPT_LOGPROB_ROWS = 128  # rows computed at a time, since a row of logits is as long as the vocabulary


def token_logprobs(rows: Sequence[Tensor], token_ids: Sequence[int], k: int) -> PromptLogprobs:
    """Returns the log-probability of `token_ids[i]` in row i, `[vocab_size]` float32 logits on the CPU, with the `k`
    most likely tokens of that row, all if there are fewer. Among equals lower ids come first, and tokens as likely as
    the given one do not count against its rank."""
    native = load_extension()
    if native is None:
        return token_logprobs_in_torch(rows, token_ids, k)
    num_top = min(k, len(rows[0])) if rows else 0
    columns = native.token_logprobs(list(rows), list(token_ids), num_top, num_threads())
    return PromptLogprobs.of_bytes(array("I", token_ids).tobytes(), *columns)


def token_logprobs_in_torch(rows: Sequence[Tensor], token_ids: Sequence[int], k: int) -> PromptLogprobs:
    """Does what `token_logprobs` does, without compiled kernels. Tests compare the kernels with it."""
    return PromptLogprobs.of(_entries(rows, token_ids, k))


def _entries(rows: Sequence[Tensor], token_ids: Sequence[int], k: int) -> Iterator[TokenLogprobs]:
    for logits, token_id in zip(rows, token_ids, strict=True):
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        ids = most_likely(logits, k) if k > 0 else torch.empty(0, dtype=torch.int64)
        top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
        rank = int((logits > logits[token_id]).sum()) + 1
        yield TokenLogprobs(token_id, float(logprobs[token_id]), rank, top)
