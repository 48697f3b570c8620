"""RMSNorm, with or without the residual sum before it, and SiLU times up. Round where `fused_reference` does."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    output,  # [num_rows, size], contiguous, like new_residual
    new_residual,
    x,
    residual,
    weight,
    num_rows,
    size,
    eps,
    x_stride,
    residual_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # size, padded to a power of two
    ADD: tl.constexpr,
):
    """Grid: (cdiv(num_rows, ROWS),). With ADD, `x + residual` is stored and normalised."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    mask = (rows < num_rows) & (columns < size)
    values = tl.load(x + rows * x_stride + columns, mask=mask, other=0.0)
    if ADD:
        others = tl.load(residual + rows * residual_stride + columns, mask=mask, other=0.0)
        values = (values.to(tl.float32) + others.to(tl.float32)).to(values.dtype)
        tl.store(new_residual + rows * size + columns, values, mask=mask)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, 1) / size
    normed = (wide * (1.0 / tl.sqrt_rn(mean + eps))[:, None]).to(values.dtype)
    factors = tl.load(weight + columns, mask=columns < size, other=0.0)
    product = normed.to(tl.float32) * factors.to(tl.float32)
    tl.store(output + rows * size + columns, product.to(values.dtype), mask=mask)


@triton.jit
def silu_mul_kernel(
    output,  # [num_rows, size], contiguous
    gate_up,  # [num_rows, 2 * size]
    size,
    row_stride,
    COLUMNS: tl.constexpr,
):
    """Grid: (num_rows, cdiv(size, COLUMNS))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < size
    gate = tl.load(gate_up + row * row_stride + columns, mask=mask, other=0.0)
    up = tl.load(gate_up + row * row_stride + size + columns, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    # exp of the negative magnitude only: nothing overflows at either end.
    decay = tl.exp(-tl.abs(wide))
    sigmoid = tl.where(wide < 0.0, decay, 1.0) / (1.0 + decay)
    activated = (wide * sigmoid).to(gate.dtype)
    tl.store(output + row * size + columns, (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=mask)
