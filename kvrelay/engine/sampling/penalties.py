"""Changes to the logits before a token is chosen: bias, minimum length and penalties for repetition.

They are applied in this order: logit bias; a ban on tokens that end the output, until `min_tokens` is reached;
repetition penalty; presence and frequency penalties. Invariant: the changes are a pure function of one row, and are
undone before anyone else reads it.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.sampling.fixed_edits import FixedEdits
from kvrelay.engine.sampling.seen_tokens import Integers, SeenTokens

Logits = npt.NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)
_NONE: Integers = np.zeros(0, dtype=np.int64)


def changes_logits(params: SamplingParams, num_output_tokens: int) -> bool:
    """Tells whether `adjust` would change anything."""
    return bool(params.biases) or num_output_tokens < params.min_tokens or reads_tokens(params)


def reads_tokens(params: SamplingParams) -> bool:
    """Tells whether `adjust` needs the output's tokens and not only their number."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def seen_tokens(params: SamplingParams, prompt_token_ids: Iterable[int]) -> SeenTokens | None:
    """Returns what `adjust` reads of a sequence's tokens, to which the output's are to be added; None if it reads none.
    Only the repetition penalty regards the prompt."""
    if not reads_tokens(params):
        return None
    return SeenTokens(prompt_token_ids if params.repetition_penalty != 1.0 else ())


def adjust(
    logits: Logits,
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int],
    num_output_tokens: int,
    seen: SeenTokens | None,
    fixed: FixedEdits,
) -> Callable[[], None]:
    """Changes one row of logits, `[vocab_size]`, in place, and returns what gives the row its values back. `seen` and
    `fixed` are those of `seen_tokens` and `fixed_edits`.

    Only the tokens that a request is about are touched: to copy a row of a large vocabulary takes longer.
    """
    banned = _NONE
    if num_output_tokens < params.min_tokens:
        ends = () if params.ignore_eos else eos_token_ids
        banned = np.concatenate((fixed.stop_ids, np.array(ends, dtype=np.int64)))
    touched = np.concatenate((fixed.biased_ids, banned, _NONE if seen is None else seen.token_ids))
    values = logits[touched]
    logits[fixed.biased_ids] += fixed.biases
    _ban(logits, banned)
    if seen is not None:
        if params.repetition_penalty != 1.0:
            _penalize_repetition(logits, seen.token_ids, params.repetition_penalty)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            _penalize_presence(logits, seen, params)

    def restore() -> None:
        logits[touched] = values

    return restore


def _ban(logits: Logits, token_ids: Integers) -> None:
    """Bans the tokens that would end the output, unless those are all tokens."""
    values = logits[token_ids]
    logits[token_ids] = -np.inf
    # One more token than are banned have one that is not, which is enough unless the model excludes it.
    if logits[: len(token_ids) + 1].max() == -np.inf and logits.max() == -np.inf:
        logits[token_ids] = values


def _penalize_repetition(logits: Logits, seen: Integers, penalty: float) -> None:
    """Divides positive logits by the penalty and multiplies others with it: CTRL (Keskar et al., 2019), section 4.1, in
    the form that also works for negative logits. It computes in float64 and clamps, so that no penalty makes a logit
    infinite; banned tokens stay banned."""
    values = logits[seen].astype(np.float64)
    with np.errstate(over="ignore"):
        penalized = np.where(values > 0, values / penalty, values * penalty).clip(-_LARGEST, _LARGEST)
    logits[seen] = np.where(np.isinf(values), values, penalized)


def _penalize_presence(logits: Logits, seen: SeenTokens, params: SamplingParams) -> None:
    """Subtracts a constant for every token of the output and another one for each time it occurs, as the OpenAI API
    defines it."""
    in_output = seen.output_counts > 0
    amounts = params.presence_penalty + params.frequency_penalty * seen.output_counts[in_output]
    logits[seen.token_ids[in_output]] -= amounts.astype(np.float32)
