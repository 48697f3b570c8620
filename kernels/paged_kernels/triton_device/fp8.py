"""FP8 e4m3 ("fn": no infinities, largest 448) by integer arithmetic, so that it is exact on every GPU.

Hardware conversions exist only from sm_89 on, and gfx942 has another e4m3. Codes are uint8.
"""

import triton
import triton.language as tl

LARGEST_E4M3 = tl.constexpr(448.0)


@triton.jit
def decode_e4m3(code):
    """Converts uint8 codes to float32, exactly. The NaN codes 0x7f and 0xff are never written and become +-480."""
    bits = code.to(tl.int16)
    # The seven magnitude bits in a float16's exponent and mantissa: right but for a bias of 15 instead of 7.
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


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
