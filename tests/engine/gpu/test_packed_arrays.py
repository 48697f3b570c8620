"""Arrays that are copied to a GPU as one range of bytes arrive as they were, where Triton may expect them."""

import numpy as np
import torch

from kvrelay.engine.gpu.packed_arrays import PackedArrays
from kvrelay.engine.step_inputs import Array


def test_arrays_of_any_type_and_shape_arrive_as_they_were_at_multiples_of_16_bytes() -> None:
    arrays: dict[str, Array] = {
        "known": np.array([True, False, True]),
        "edits": np.zeros(0, np.int32),
        "seeds": np.array([2**64 - 1, 1, 2**63], np.uint64),
        "temperatures": np.array([0.5], np.float32),
        "top_ps": np.array([0.1, 0.9, 1.0], np.float64),
        "block_tables": np.arange(15, dtype=np.int32).reshape(3, 5),
        "positions": np.arange(12, dtype=np.int64).reshape(3, 4).T,  # whose rows do not follow each other in memory
    }
    packed = PackedArrays(arrays)
    target = torch.full((packed.num_bytes + 8,), 0xAB, dtype=torch.uint8)
    packed.to(target)
    views = packed.views(target)
    for name, array in arrays.items():
        np.testing.assert_array_equal(views[name].numpy().view(array.dtype), array, strict=True)
        assert views[name].data_ptr() % 16 == 0, name
    assert set(target[packed.num_bytes :].tolist()) == {0xAB}, "what is behind them is not theirs"
