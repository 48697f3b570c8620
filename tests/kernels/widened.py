"""What tests have to know of when the kernels widen quantised weights, which rounds them once more."""

from paged_kernels import native


def may_be_widened(num_rows: int) -> bool:
    """Whether a product of so many rows may be one with weights rounded to bfloat16. Without digits, which byte dot
    products multiply, fewer rows suffice."""
    return num_rows >= (32 if native.instruction_set() in ("portable", "avx2", "avx512") else 64)
