"""Matrix product with weights of 4 or 8 bits as AWQ and GPTQ store them, dequantised tile by tile on the way in; and
their dequantisation by itself.

`paged_kernels.prequantized_weight` says which bits are which code.
"""

import triton
import triton.language as tl

from paged_kernels.triton_device.tiles import matmul


@triton.jit
def unpack_columns(packed, shifts, BITS: tl.constexpr):
    """Unpacks `[rows, columns / PER_WORD]` int32 to `[rows, columns]` of 0 to 2^BITS - 1, for PER_WORD = 32 / BITS
    shifts."""
    codes = (packed[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1)
    return tl.reshape(codes, [packed.shape[0], packed.shape[1] * (32 // BITS)])


@triton.jit
def dequantized_tile(
    codes,  # AWQ: [num_inputs, num_outputs / PER_WORD] int32; GPTQ: [num_inputs / PER_WORD, num_outputs]
    zeros,  # [num_groups, num_outputs / PER_WORD] int32
    scales,  # [num_groups, num_outputs]
    group_of_input,  # [num_inputs] int32, read with SHUFFLED only
    start,  # the first input
    last,  # inputs from here on are 0, or of no meaning
    output_tile,
    num_outputs,
    num_inputs,
    group_size,
    zero_offset,  # added to stored zeros: 1 for GPTQ's first format
    BITS: tl.constexpr,  # 4 or 8, of which an int32 holds PER_WORD; AWQ has 4
    AWQ: tl.constexpr,
    SHUFFLED: tl.constexpr,
    ONE_GROUP: tl.constexpr,  # a tile of inputs lies in one group
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Returns a tile of the weights, `[TILE_INPUTS, TILE_OUTPUTS]` float32."""
    PER_WORD: tl.constexpr = 32 // BITS
    columns = output_tile * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    packed_columns = output_tile * (TILE_OUTPUTS // PER_WORD) + tl.arange(0, TILE_OUTPUTS // PER_WORD)
    column_mask = columns < num_outputs
    packed_mask = packed_columns < num_outputs // PER_WORD
    places = tl.arange(0, PER_WORD)
    if AWQ:
        column_shifts = (places % 2 * 4 + places // 2) * 4
    else:
        column_shifts = places * BITS
    inputs = start + tl.arange(0, TILE_INPUTS)
    input_mask = inputs < last
    if AWQ:
        offsets = inputs.to(tl.int64)[:, None] * (num_outputs // PER_WORD) + packed_columns[None, :]
        packed = tl.load(codes + offsets, mask=input_mask[:, None] & packed_mask[None, :], other=0)
        code = unpack_columns(packed, column_shifts, BITS)
    else:
        packed_inputs = start // PER_WORD + tl.arange(0, TILE_INPUTS // PER_WORD)
        offsets = packed_inputs.to(tl.int64)[:, None] * num_outputs + columns[None, :]
        mask = (packed_inputs * PER_WORD < last)[:, None] & column_mask[None, :]
        packed = tl.load(codes + offsets, mask=mask, other=0)
        fields = (packed[:, None, :] >> (places * BITS)[None, :, None]) & ((1 << BITS) - 1)
        code = tl.reshape(fields, [TILE_INPUTS, TILE_OUTPUTS])
    if SHUFFLED:
        groups = tl.load(group_of_input + inputs, mask=input_mask, other=0)
    elif ONE_GROUP:
        groups = start // group_size + tl.arange(0, 1)
    else:
        groups = tl.minimum(inputs, num_inputs - 1) // group_size
    zero_offsets = groups[:, None] * (num_outputs // PER_WORD) + packed_columns[None, :]
    packed_zeros = tl.load(zeros + zero_offsets, mask=packed_mask[None, :], other=0)
    zero = unpack_columns(packed_zeros, column_shifts, BITS) + zero_offset
    scale = tl.load(scales + groups[:, None] * num_outputs + columns[None, :], mask=column_mask[None, :], other=0.0)
    return (code - zero).to(tl.float32) * scale.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def prequantized_matmul_kernel(
    output,  # [splits, num_rows, num_outputs], contiguous; float32 when there is more than one split
    x,
    codes,
    zeros,
    scales,
    group_of_input,
    bias,  # [num_outputs], read with HAS_BIAS only
    num_rows,
    num_outputs,
    num_inputs,
    group_size,
    zero_offset,
    inputs_per_split,  # a multiple of TILE_INPUTS
    x_stride,
    BITS: tl.constexpr,
    AWQ: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHUFFLED: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Grid: (cdiv(num_outputs, TILE_OUTPUTS), cdiv(num_rows, TILE_ROWS), splits)."""
    split = tl.program_id(2)
    rows = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    column_mask = columns < num_outputs
    first = split * inputs_per_split
    last = tl.minimum(first + inputs_per_split, num_inputs)
    accumulator = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    for start in tl.range(first, last, TILE_INPUTS):
        weight = dequantized_tile(
            codes,
            zeros,
            scales,
            group_of_input,
            start,
            last,
            tl.program_id(0),
            num_outputs,
            num_inputs,
            group_size,
            zero_offset,
            BITS,
            AWQ,
            SHUFFLED,
            ONE_GROUP,
            TILE_OUTPUTS,
            TILE_INPUTS,
        )
        inputs = start + tl.arange(0, TILE_INPUTS)
        x_offsets = rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
        x_tile = tl.load(x + x_offsets, mask=(rows < num_rows)[:, None] & (inputs < last)[None, :], other=0.0)
        accumulator += matmul(x_tile, weight.to(x_tile.dtype), DOT_FP32)
    if HAS_BIAS:
        accumulator += tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    output_offsets = (split.to(tl.int64) * num_rows + rows)[:, None] * num_outputs + columns[None, :]
    tl.store(output + output_offsets, accumulator, mask=(rows < num_rows)[:, None] & column_mask[None, :])


@triton.jit
def dequantize_kernel(
    output,  # [num_inputs, num_outputs], contiguous
    codes,
    zeros,
    scales,
    group_of_input,
    num_outputs,
    num_inputs,
    group_size,
    zero_offset,
    BITS: tl.constexpr,
    AWQ: tl.constexpr,
    SHUFFLED: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Grid: (cdiv(num_outputs, TILE_OUTPUTS), cdiv(num_inputs, TILE_INPUTS))."""
    start = tl.program_id(1) * TILE_INPUTS
    weight = dequantized_tile(
        codes,
        zeros,
        scales,
        group_of_input,
        start,
        num_inputs,
        tl.program_id(0),
        num_outputs,
        num_inputs,
        group_size,
        zero_offset,
        BITS,
        AWQ,
        SHUFFLED,
        ONE_GROUP,
        TILE_OUTPUTS,
        TILE_INPUTS,
    )
    inputs = start + tl.arange(0, TILE_INPUTS)
    columns = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    offsets = inputs.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(output + offsets, weight, mask=(inputs < num_inputs)[:, None] & (columns < num_outputs)[None, :])
