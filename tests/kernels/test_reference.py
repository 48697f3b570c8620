"""The oracle itself, against torch's own attention on contiguous tensors."""

import pytest
import torch
from paged_kernels.reference import ReferenceBackend
from torch.nn.functional import scaled_dot_product_attention

from tests.kernels.batch import LAYER, Heads, make_batch


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("lengths", [(0, 50), (49, 1), (30, 20)])
def test_agrees_with_torch(lengths: tuple[int, int], window: int | None) -> None:
    heads = Heads(6, 2, 32)
    batch = make_batch(heads, torch.float64, (lengths,), sliding_window=window)
    seq_len = sum(lengths)
    # [num_blocks, num_kv_heads, 2, block_size, head_dim]
    blocks = batch.pool[batch.metadata.block_tables[0].long(), :, LAYER]
    tokens = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :seq_len].nan_to_num()
    position = torch.arange(seq_len)
    seen = position <= position[lengths[0] :, None]
    if window is not None:
        seen &= position > position[lengths[0] :, None] - window
    expected = scaled_dot_product_attention(
        batch.query.transpose(0, 1), tokens[0], tokens[1], attn_mask=seen, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(batch.attend(ReferenceBackend()), expected)
