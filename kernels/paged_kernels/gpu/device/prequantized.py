"""Matrix product with weights of 4 or 8 bits as AWQ and GPTQ store them, dequantised tile by tile on the way in; and
their dequantisation by itself.

`paged_kernels.prequantized_weight` says which bits are which code. Here codes and zeros are read as bytes: one code of
8 bits, or two of 4 bits, the lower of which comes first. A tile of weights is `[outputs, inputs]`, the left operand of
the product, which the tensor cores of sm_90 take from registers. Between the loads and the product there are only
elementwise operations, views and joins of the halves of a byte. Over these, and only these, the compiler moves the
change to the operand's layout up to the loads: each thread then loads the bytes whose weights it multiplies, and no
weight passes through shared memory. A shift by a number that depends on the place would end that.
"""

import triton
import triton.language as tl

from paged_kernels.gpu.device.tiles import matmul

TWO_TO_23 = tl.constexpr(0x4B000000)  # the bits of 2^23 as float32, whose lowest bit counts 1


@triton.jit
def plus_two_to_23(code):
    """Returns 2^23 plus a smaller integer as float32, exactly: cheaper than to convert the integer."""
    return (code.to(tl.int32) | TWO_TO_23).to(tl.float32, bitcast=True)


@triton.jit
def unpack(packed, BITS: tl.constexpr):
    """Returns the codes of bytes: their lower and upper halves, in a new last dimension, or the bytes themselves."""
    if BITS == 4:
        packed = packed.to(tl.int32)
        return tl.join(packed & 15, packed >> 4)
    else:
        return packed


@triton.jit
def awq_codes(packed):
    """Unpacks bytes `[inputs, outputs / 2]` to `[outputs, inputs]`. Of 64 outputs, which are eight words, those in the
    words' lowest nibbles come first, then those in the next: a thread of a tensor core's operand has both halves of a
    byte if they are eight rows apart."""
    nibbles = tl.reshape(unpack(packed, 4), [packed.shape[0], packed.shape[1] // 32, 8, 4, 2])
    return tl.reshape(tl.permute(nibbles, (1, 3, 4, 2, 0)), [packed.shape[1] * 2, packed.shape[0]])


@triton.jit
def to_awq_order(tile):
    """Puts the outputs of a tile, its first dimension, into the order of `awq_codes`: the nibbles of a word are its
    outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    parts = tl.reshape(tile, [tile.shape[0] // 64, 8, 2, 2, 2, tile.shape[1]])
    return tl.reshape(tl.permute(parts, (0, 4, 2, 3, 1, 5)), [tile.shape[0], tile.shape[1]])


@triton.jit
def from_awq_order(tile):
    """Undoes `to_awq_order`."""
    parts = tl.reshape(tile, [tile.shape[0] // 64, 2, 2, 2, 8, tile.shape[1]])
    return tl.reshape(tl.permute(parts, (0, 4, 2, 3, 1, 5)), [tile.shape[0], tile.shape[1]])


@triton.jit
def gptq_codes(packed, BITS: tl.constexpr):
    """Unpacks bytes `[words, 4 * outputs]` to `[outputs, inputs]`."""
    PER_WORD: tl.constexpr = 32 // BITS
    fields = tl.reshape(unpack(packed, BITS), [packed.shape[0], packed.shape[1] // 4, PER_WORD])
    return tl.reshape(tl.permute(fields, (1, 0, 2)), [packed.shape[1] // 4, packed.shape[0] * PER_WORD])


@triton.jit
def load_of_groups(table, groups, stride, columns, mask, ONE_GROUP: tl.constexpr):
    """Loads `columns` of rows of a table, as `[columns, rows]`. `groups` are the rows, or with ONE_GROUP the row."""
    if ONE_GROUP:
        return tl.load(table + groups * stride + columns, mask=mask, other=0)[:, None]
    else:
        return tl.load(table + groups[None, :] * stride + columns[:, None], mask=mask[:, None], other=0)


@triton.jit
def gptq_zeros(
    zeros, groups, stride, output_tile, BITS: tl.constexpr, ONE_GROUP: tl.constexpr, TILE_OUTPUTS: tl.constexpr
):
    """Returns the stored zeros of the groups, `[outputs, groups]`."""
    if BITS == 4 and ONE_GROUP:
        # Neighbouring outputs are of different threads, which cannot be joined. A mask may depend on the place.
        columns = output_tile * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
        is_output = columns // 2 < stride
        lower = load_of_groups(zeros, groups, stride, columns // 2, is_output & (columns % 2 == 0), ONE_GROUP)
        upper = load_of_groups(zeros, groups, stride, columns // 2, is_output & (columns % 2 == 1), ONE_GROUP)
        return (lower & 15) | (upper >> 4)
    else:
        ROW_BYTES: tl.constexpr = TILE_OUTPUTS * BITS // 8
        row_bytes = output_tile * ROW_BYTES + tl.arange(0, ROW_BYTES)
        packed = load_of_groups(zeros, groups, stride, row_bytes, row_bytes < stride, ONE_GROUP)
        if BITS == 8:
            return packed
        else:
            return tl.reshape(tl.permute(unpack(packed, BITS), (0, 2, 1)), [TILE_OUTPUTS, packed.shape[1]])


@triton.jit
def dequantized_tile(
    codes,  # bytes of AWQ: [num_inputs, num_outputs / 8] int32; GPTQ: [num_inputs / PER_WORD, num_outputs] int32
    zeros,  # bytes of [num_groups, num_outputs / PER_WORD] int32
    scales,  # [num_groups, num_outputs]
    start,  # the first input
    last,  # inputs from here on are 0, or of no meaning
    output_tile,
    num_outputs,
    num_inputs,
    group_size,
    code_stride,  # bytes of a row of codes
    zero_stride,  # bytes of a row of zeros
    BITS: tl.constexpr,  # 4 or 8, of which an int32 holds PER_WORD; AWQ has 4
    AWQ: tl.constexpr,
    ZERO_OFFSET: tl.constexpr,  # added to stored zeros: 1 for GPTQ's first format
    ONE_GROUP: tl.constexpr,  # a tile of inputs lies in one group
    TILE_OUTPUTS: tl.constexpr,  # a multiple of 64
    TILE_INPUTS: tl.constexpr,
):
    """Returns a tile of the weights, `[TILE_OUTPUTS, TILE_INPUTS]` float32, AWQ's in the order of `awq_codes`."""
    INPUTS_PER_ROW: tl.constexpr = 1 if AWQ else 32 // BITS
    ROW_BYTES: tl.constexpr = TILE_OUTPUTS // 2 if AWQ else TILE_OUTPUTS * 4
    if ONE_GROUP:
        groups = start // group_size
    else:
        groups = tl.minimum(start + tl.arange(0, TILE_INPUTS), num_inputs - 1) // group_size
    # Scales and zeros come first: what of them is too narrow for an asynchronous copy arrives while codes are waited
    # for.
    columns = output_tile * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    scale = load_of_groups(scales, groups, num_outputs, columns, columns < num_outputs, ONE_GROUP)
    row_bytes = output_tile * ROW_BYTES + tl.arange(0, ROW_BYTES)
    if AWQ:
        packed_zeros = load_of_groups(zeros, groups, zero_stride, row_bytes, row_bytes < zero_stride, ONE_GROUP)
        zero = awq_codes(tl.trans(packed_zeros))
        scale = to_awq_order(scale)
    else:
        zero = gptq_zeros(zeros, groups, zero_stride, output_tile, BITS, ONE_GROUP, TILE_OUTPUTS)
    rows = start // INPUTS_PER_ROW + tl.arange(0, TILE_INPUTS // INPUTS_PER_ROW)
    offsets = rows.to(tl.int64)[:, None] * code_stride + row_bytes[None, :]
    mask = (rows * INPUTS_PER_ROW < last)[:, None] & (row_bytes < code_stride)[None, :]
    packed = tl.load(codes + offsets, mask=mask, other=0)
    if AWQ:
        code = awq_codes(packed)
    else:
        code = gptq_codes(packed, BITS)
    zero = plus_two_to_23(zero.to(tl.int32) + ZERO_OFFSET)
    return (plus_two_to_23(code) - zero) * scale.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def prequantized_matmul_kernel(
    output,  # [splits, num_rows, num_outputs], contiguous; float32 when there is more than one split
    x,
    codes,
    zeros,
    scales,
    bias,  # [num_outputs], read with HAS_BIAS only
    num_rows,
    num_outputs,
    num_inputs,
    group_size,
    code_stride,
    zero_stride,
    inputs_per_split,  # a multiple of TILE_INPUTS
    x_stride,
    BITS: tl.constexpr,
    AWQ: tl.constexpr,
    ZERO_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Grid: (cdiv(num_outputs, TILE_OUTPUTS), cdiv(num_rows, TILE_ROWS), splits)."""
    split = tl.program_id(2)
    rows = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    is_row = rows < num_rows
    first = split * inputs_per_split
    last = tl.minimum(first + inputs_per_split, num_inputs)
    accumulator = tl.zeros([TILE_OUTPUTS, TILE_ROWS], tl.float32)
    for start in tl.range(first, last, TILE_INPUTS):
        weight = dequantized_tile(
            codes,
            zeros,
            scales,
            start,
            last,
            tl.program_id(0),
            num_outputs,
            num_inputs,
            group_size,
            code_stride,
            zero_stride,
            BITS,
            AWQ,
            ZERO_OFFSET,
            ONE_GROUP,
            TILE_OUTPUTS,
            TILE_INPUTS,
        )
        inputs = start + tl.arange(0, TILE_INPUTS)
        x_offsets = rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
        x_tile = tl.load(x + x_offsets, mask=is_row[:, None] & (inputs < last)[None, :], other=0.0)
        accumulator += matmul(weight.to(x_tile.dtype), tl.trans(x_tile), DOT_FP32)
    if AWQ:
        accumulator = from_awq_order(accumulator)
    columns = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_output = columns < num_outputs
    if HAS_BIAS:
        accumulator += tl.load(bias + columns, mask=is_output, other=0.0).to(tl.float32)[:, None]
    output_offsets = (split.to(tl.int64) * num_rows + rows)[None, :] * num_outputs + columns[:, None]
    tl.store(output + output_offsets, accumulator, mask=is_row[None, :] & is_output[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def add_splits_kernel(
    output,  # [num_rows, num_outputs], contiguous
    parts,  # [num_splits, num_rows, num_outputs] float32, contiguous
    bias,  # [num_outputs], read with HAS_BIAS only
    num_rows,
    num_outputs,
    num_splits,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,  # at least num_splits
    TILE_OUTPUTS: tl.constexpr,
):
    """Grid: (cdiv(num_outputs, TILE_OUTPUTS), num_rows)."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_output = columns < num_outputs
    splits = tl.arange(0, SPLITS)
    offsets = (splits * num_rows + row)[:, None] * num_outputs + columns[None, :]
    part = tl.load(parts + offsets, mask=(splits < num_splits)[:, None] & is_output[None, :], other=0.0)
    total = tl.sum(part, 0)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output + row * num_outputs + columns, total, mask=is_output)


@triton.jit
def dequantize_kernel(
    output,  # [num_inputs, num_outputs], contiguous
    codes,
    zeros,
    scales,
    num_outputs,
    num_inputs,
    group_size,
    code_stride,
    zero_stride,
    BITS: tl.constexpr,
    AWQ: tl.constexpr,
    ZERO_OFFSET: tl.constexpr,
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
        start,
        num_inputs,
        tl.program_id(0),
        num_outputs,
        num_inputs,
        group_size,
        code_stride,
        zero_stride,
        BITS,
        AWQ,
        ZERO_OFFSET,
        ONE_GROUP,
        TILE_OUTPUTS,
        TILE_INPUTS,
    )
    weight = weight.to(output.dtype.element_ty)
    if AWQ:
        weight = from_awq_order(weight)
    inputs = start + tl.arange(0, TILE_INPUTS)
    columns = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    offsets = inputs.to(tl.int64)[None, :] * num_outputs + columns[:, None]
    tl.store(output + offsets, weight, mask=(inputs < num_inputs)[None, :] & (columns < num_outputs)[:, None])
