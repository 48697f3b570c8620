"""What a request wants of single tokens in every step alike: their bias, and that they end the output.

There may be 65,536 of each, so this is built once for a request. Invariant: it does not change afterwards, so that the
request's outputs share it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.sampling.seen_tokens import Integers


@dataclass(frozen=True, slots=True, eq=False)
class FixedEdits:
    """The tokens of `logit_bias` and of `stop_token_ids`. Those in arrays are distinct and ascending."""

    biased_ids: Integers  # [num_biased]
    biases: npt.NDArray[np.float32]  # [num_biased]
    stop_ids: Integers  # [num_stops]
    stop_token_ids: frozenset[int]


NO_EDITS = FixedEdits(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.int64), frozenset())


def fixed_edits(params: SamplingParams) -> FixedEdits:
    if not params.biases and not params.stop_token_ids:
        return NO_EDITS
    bias_of = dict(params.biases)
    biased_ids = np.fromiter(bias_of, np.int64, len(bias_of))
    order = np.argsort(biased_ids)
    biases = np.fromiter(bias_of.values(), np.float32, len(bias_of))[order]
    stops = frozenset(params.stop_token_ids)
    stop_ids = np.sort(np.fromiter(stops, np.int64, len(stops)))
    return FixedEdits(biased_ids[order], biases, stop_ids, stops)
