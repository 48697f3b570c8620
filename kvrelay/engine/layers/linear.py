"""A linear layer that may hold several of a checkpoint's side by side, so that one matrix product serves them all.

Invariant: the layer owns its weights. Before `pack` they are `[num_outputs, num_inputs]` and can be filled; after it
their layout may belong to the matrix library, and they can only be used.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """`parts` names the checkpoint's layers and their output sizes, in order of rows. Weights are uninitialised until
    loaded."""

    def __init__(
        self, parts: Sequence[tuple[str, int]], num_inputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        num_outputs = sum(size for _, size in parts)
        self.parts = tuple(parts)
        self.weight = torch.empty(num_outputs, num_inputs, dtype=dtype, device=device)
        self.bias = torch.empty(num_outputs, dtype=dtype, device=device) if bias else None  # [num_outputs]
        self.packed = False

    def __call__(self, x: Tensor) -> Tensor:
        """`[num_tokens, num_inputs]` -> `[num_tokens, num_outputs]`."""
        if self.packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return product
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Once, after loading: brings the weights into the order in which oneDNN reads them, where it has one.

        `F.linear` would reorder them in every call, and reading weights is what decoding spends its time on. The
        results are the same.
        """
        if self.weight.dtype is torch.bfloat16 and self.weight.device.type == "cpu" and _onednn_has_bfloat16():
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)
            self.packed = True

    def slots(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint name and memory of every tensor; the parts are contiguous views of the merged ones. Not after
        `pack`."""
        assert not self.packed
        begin = 0
        for name, size in self.parts:
            yield f"{prefix}{name}.weight", self.weight[begin : begin + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[begin : begin + size]
            begin += size


def _onednn_has_bfloat16() -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
