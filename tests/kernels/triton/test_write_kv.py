"""Writing KV: exactly the slots asked for, rotated and quantised as the oracles do."""

import pytest
import torch
from paged_kernels import fused_reference
from paged_kernels.gpu.attention import TritonBackend
from paged_kernels.kv_scales import KVScales
from paged_kernels.reference import ReferenceBackend
from torch import Tensor

NUM_LAYERS = 3
LAYER = 1


def write(key: Tensor, value: Tensor, pool: Tensor, slots: Tensor, kv_scales: KVScales | None = None) -> None:
    """Stores keys that are rotated by nothing."""
    shape = len(key), key.shape[2] // 2
    still = torch.ones(shape), torch.zeros(shape)
    TritonBackend(kv_scales).write_kv_rotary(key.clone(), key, value, still, pool, LAYER, slots)


@pytest.mark.parametrize("head_dim", [64, 80, 96])
@pytest.mark.parametrize("num_tokens", [0, 7])
def test_writes_only_its_slots(num_tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    pool = torch.zeros(9, 3, NUM_LAYERS, 2, 16, head_dim, dtype=dtype)
    fused = torch.randn(num_tokens, 8, head_dim).to(dtype)
    slots = torch.randperm(9 * 16)[:num_tokens]
    expected = pool.clone()
    ReferenceBackend().write_kv(fused[:, 2:5], fused[:, 5:], expected, LAYER, slots)
    write(fused[:, 2:5], fused[:, 5:], pool, slots)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("full_width", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rotates_on_the_way(head_dim: int, full_width: bool, dtype: torch.dtype) -> None:
    num_tokens = 6
    fused = torch.randn(num_tokens, 11, head_dim).to(dtype)  # 7 query, 2 key, 2 value heads
    angles = torch.rand(num_tokens, head_dim // 2) * 100
    if full_width:
        angles = torch.cat((angles, angles), dim=-1)
    pool = torch.zeros(4, 2, NUM_LAYERS, 2, 16, head_dim, dtype=dtype)
    slots = torch.tensor([3, 17, -1, 60, 1, 2])
    expected, expected_pool = fused.clone(), pool.clone()
    fused_reference.rotary(expected[:, :7], expected[:, 7:9], angles.cos(), angles.sin())
    kept = slots >= 0
    ReferenceBackend().write_kv(expected[kept, 7:9], expected[kept, 9:], expected_pool, LAYER, slots[kept])
    before = fused.clone()
    TritonBackend().write_kv_rotary(
        fused[:, :7], fused[:, 7:9], fused[:, 9:], (angles.cos(), angles.sin()), pool, LAYER, slots
    )
    torch.testing.assert_close(fused[kept, :7], expected[kept, :7])
    torch.testing.assert_close(pool, expected_pool)
    assert torch.equal(fused[:, 7:], before[:, 7:]) and torch.equal(fused[2], before[2])


def scales(num_kv_heads: int) -> KVScales:
    shape = (NUM_LAYERS, num_kv_heads)
    return KVScales(torch.rand(shape) * 0.02 + 0.005, torch.rand(shape) * 0.02 + 0.005)


def test_fp8_is_what_torch_rounds_to(dtype: torch.dtype) -> None:
    pool = torch.zeros(4, 2, NUM_LAYERS, 2, 16, 64, dtype=torch.float8_e4m3fn)
    fused = torch.randn(20, 4, 64).to(dtype) * 2
    slots = torch.randperm(64)[:20]
    kv_scales = scales(2)
    wide = torch.zeros(pool.shape)
    ReferenceBackend().write_kv(fused[:, :2].float(), fused[:, 2:].float(), wide, LAYER, slots)
    factors = torch.stack(kv_scales.of_layer(LAYER), dim=-1)[None, :, None, :, None, None]
    expected = (wide * (1.0 / factors)).clamp(-448, 448).to(torch.float8_e4m3fn)
    write(fused[:, :2], fused[:, 2:], pool, slots, kv_scales)
    assert torch.equal(pool.view(torch.uint8), expected.view(torch.uint8))


def test_refuses_what_does_not_fit() -> None:
    pool = torch.zeros(4, 2, NUM_LAYERS, 2, 16, 64)
    rows = torch.ones(2, 2, 64)
    with pytest.raises(ValueError, match="do not fit the pool"):
        write(rows[:, :1], rows[:, :1], pool, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="agree in tokens"):
        write(rows, rows[:1], pool, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="kv_scales"):
        write(rows, rows, pool.to(torch.float8_e4m3fn), torch.tensor([0, 1]))
