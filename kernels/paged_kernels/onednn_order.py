"""In which order oneDNN keeps bfloat16 weights of one shape, found out by letting it pack a known pattern.

What oneDNN returns names its order in its metadata, and it reads any memory with that metadata in that order. So one
comparison of every word per shape is enough: weights that we bring into the order ourselves and hand to oneDNN with the
same metadata are read as they lie, whatever it would choose another time.
"""

import ctypes
import functools

import numpy as np
import torch
from torch import Tensor

from paged_kernels.extension import load_extension

PANEL_OUTPUTS = 32
INPUT_MULTIPLE = 32

# A prime: no order of blocks moves a word by a multiple of it to where the pattern has the same again.
_PATTERN_WORDS = 1_048_573
_SMALLEST, _BEYOND = 0x0080, 0x7F80  # bits of the positive normal numbers, which every copy leaves alone


@functools.cache
def known_order(num_outputs: int, num_inputs: int, num_threads: int) -> Tensor | None:
    """oneDNN's metadata for weights `[num_outputs, num_inputs]`, which it chose for `num_threads`; None unless that
    means the order of `csrc/packed_linear.h`."""
    native = load_extension()
    if native is None:
        return None
    probe = _pattern(num_outputs, num_inputs)
    opaque: Tensor = torch.ops.mkldnn._reorder_linear_weight(probe)
    num_panels, padded_inputs = -(-num_outputs // PANEL_OUTPUTS), -(-num_inputs // INPUT_MULTIPLE) * INPUT_MULTIPLE
    num_bytes: int = torch.ops.mkldnn._nbytes(opaque)
    if num_bytes != num_panels * padded_inputs * PANEL_OUTPUTS * probe.itemsize:
        return None
    memory = (ctypes.c_char * num_bytes).from_address(torch.ops.mkldnn.data_ptr(opaque))
    if not native.is_packed(torch.frombuffer(memory, dtype=torch.bfloat16).view(num_panels, -1), probe, num_threads):
        return None
    metadata: Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(opaque)
    return metadata


def _pattern(num_outputs: int, num_inputs: int) -> Tensor:
    words = np.random.default_rng(0).integers(_SMALLEST, _BEYOND, _PATTERN_WORDS, dtype=np.uint16)
    pattern = np.resize(words, (num_outputs, num_inputs)).view(np.int16)
    return torch.from_numpy(pattern).view(torch.bfloat16)
