"""What tests have to know of when quantised weights are widened, which rounds them once more."""

import torch
from paged_kernels import _native
from torch import Tensor


def may_be_widened(x: Tensor) -> bool:
    """Whether a product of rows `[num_rows, num_inputs]` may be one with weights rounded to their dtype. Without
    digits, which byte dot products multiply, fewer rows suffice; with digits, but without products of bfloat16, none
    are enough."""
    instruction_set = _native.instruction_set().removesuffix("_emulated")
    if x.dtype == torch.bfloat16 and instruction_set == "avx512_vnni":
        return False
    return x.shape[0] >= (32 if instruction_set in ("portable", "avx2", "avx512") else 64)
