"""Changes to the logits before a token is chosen: bias, minimum length and penalties for repetition.

They are applied in this order: logit bias; a ban on tokens that end the output, until `min_tokens` is reached;
repetition penalty; presence and frequency penalties. Invariant: the result is a pure function of one row, and the
caller's logits are never written to.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvrelay.core.sampling_params import SamplingParams
from kvrelay.engine.sampling.fixed_edits import FixedEdits
from kvrelay.engine.sampling.seen_tokens import SeenTokens

_LARGEST = torch.finfo(torch.float32).max


def changes_logits(params: SamplingParams, num_output_tokens: int) -> bool:
    """Tells whether `adjust` would change anything."""
    return bool(params.biases) or num_output_tokens < params.min_tokens or reads_tokens(params)


def reads_tokens(params: SamplingParams) -> bool:
    """Tells whether `adjust` needs the output's tokens and not only their number."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def seen_tokens(
    params: SamplingParams, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int] = ()
) -> SeenTokens | None:
    """Returns what `adjust` reads of a sequence's tokens, None if it reads none. Only the repetition penalty regards
    the prompt."""
    if not reads_tokens(params):
        return None
    return SeenTokens(prompt_token_ids if params.repetition_penalty != 1.0 else (), output_token_ids)


def adjust(
    logits: Tensor,
    params: SamplingParams,
    *,
    eos_token_ids: Sequence[int],
    num_output_tokens: int,
    seen: SeenTokens | None,
    fixed: FixedEdits,
) -> Tensor:
    """Returns a changed copy of one row of logits, `[vocab_size]` float32. `seen` and `fixed` are those of
    `seen_tokens` and `fixed_edits`."""
    logits = logits.clone()
    if params.biases:
        logits.index_add_(0, torch.from_numpy(fixed.biased_ids), torch.from_numpy(fixed.biases))
    if num_output_tokens < params.min_tokens:
        _ban_ends(logits, fixed, () if params.ignore_eos else eos_token_ids)
    if seen is not None:
        if params.repetition_penalty != 1.0:
            _penalize_repetition(logits, torch.from_numpy(seen.token_ids), params.repetition_penalty)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            _penalize_presence(logits, seen, params)
    return logits


def _ban_ends(logits: Tensor, fixed: FixedEdits, eos_token_ids: Sequence[int]) -> None:
    """Bans the tokens that would end the output, unless those are all tokens."""
    if not fixed.stop_token_ids and not eos_token_ids:
        return
    banned = logits.index_fill(0, torch.from_numpy(fixed.stop_ids), -torch.inf)
    banned[list(eos_token_ids)] = -torch.inf
    if banned.max() > -torch.inf:
        logits.copy_(banned)


def _penalize_repetition(logits: Tensor, seen: Tensor, penalty: float) -> None:
    """Divides positive logits by the penalty and multiplies others with it: CTRL (Keskar et al., 2019), section 4.1, in
    the form that also works for negative logits. It computes in float64 and clamps, so that no penalty makes a logit
    infinite; banned tokens stay banned."""
    values = logits[seen].to(torch.float64)
    penalized = torch.where(values > 0, values / penalty, values * penalty).clamp(-_LARGEST, _LARGEST)
    logits[seen] = torch.where(values.isinf(), values, penalized).to(logits.dtype)


def _penalize_presence(logits: Tensor, seen: SeenTokens, params: SamplingParams) -> None:
    """Subtracts a constant for every token of the output and another one for each time it occurs, as the OpenAI API
    defines it."""
    in_output = seen.output_counts > 0
    amounts = params.presence_penalty + params.frequency_penalty * seen.output_counts[in_output]
    logits[torch.from_numpy(seen.token_ids[in_output])] -= torch.from_numpy(amounts).to(logits.dtype)
