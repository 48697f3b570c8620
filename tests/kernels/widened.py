"""What tests have to know of when quantised weights are widened, which rounds them once more."""

import torch
from paged_kernels import _native
from torch import Tensor


def may_be_widened(x: Tensor) -> bool:
    """Tells whether a product of rows `[num_rows, num_inputs]` may be one with weights rounded to their dtype. That
    begins with fewer rows where the processor has no dot products of bytes, for which inputs would be cut into digits.
    Where it has them, but no products of bfloat16, bfloat16 is never widened."""
    instruction_set = _native.instruction_set().removesuffix("_emulated")
    if x.dtype == torch.bfloat16 and instruction_set == "avx512_vnni":
        return False
    return x.shape[0] >= (32 if instruction_set in ("portable", "avx2", "avx512") else 64)
