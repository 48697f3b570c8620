"""FP8 e4m3 ("fn": no infinities, largest 448), exactly: by a GPU's own conversions, or by integer arithmetic.

Hardware decodes from sm_89 on; gfx942 has another e4m3. Codes are uint8, or pairs of them in an int16. The NaN codes
0x7f and 0xff are never written; hardware makes them NaN, integers +-480.
"""

import triton
import triton.language as tl

LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def decode_e4m3(codes, CONVERT_FP8: tl.constexpr):
    """Converts uint8 codes to float16."""
    if CONVERT_FP8:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        return _half_of_code(codes.to(tl.int16) << 8)


@triton.jit
def decode_pairs(pairs, CONVERT_FP8: tl.constexpr):
    """Converts int16, each two codes, to two float16 tensors: of the low and of the high bytes."""
    if CONVERT_FP8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return _half_of_code(pairs << 8), _half_of_code(pairs)


@triton.jit
def _half_of_code(bits):
    """Decodes the high bytes of int16."""
    # The seven magnitude bits in a float16's exponent and mantissa: right but for a bias of 15 instead of 7.
    half = (bits & -0x8000) | ((bits >> 1) & 0x3F80)
    return half.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def fit_to_codes(rows):
    """Converts bfloat16 to float16, which codes are decoded to. Each row is divided by a power of two, returned as
    `[len(rows), 1]` float32, so that it fits. Exact but for numbers below 2**-17 of the largest of their row, whose
    error is at most 2**-25 of that."""
    wide = rows.to(tl.float32)
    exponent = tl.max(tl.abs(wide), 1)[:, None].to(tl.int32, bitcast=True) & 0x7F800000
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    return (wide * inverse).to(tl.float16), exponent.to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x):
    """Converts float32 to uint8 codes: to the nearest, ties to even; what is too large, and NaN, becomes the
    largest."""
    absolute = tl.abs(x)
    magnitude = tl.where(absolute < LARGEST_E4M3, absolute, LARGEST_E4M3)  # NaN too, which a minimum may keep
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = bits + 0x7FFFF + ((bits >> 20) & 1)  # 20 of the 23 mantissa bits go
    normal = (rounded >> 20) - ((127 - 7) << 3)
    # Below 2**-6 codes are multiples of 2**-9. Near 2**14 that is the distance of float32 numbers: the sum rounds.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)
