"""How far row-wise operations may be from plain torch."""

import torch
from torch import Tensor

# Against float64: float32 differs by its own rounding only; half precision by a rounding step here or there.
_TOLERANCE = {torch.float32: (1e-6, 1e-6), torch.bfloat16: (2**-6, 2**-9), torch.float16: (2**-9, 2**-11)}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = _TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=rtol, atol=atol)
