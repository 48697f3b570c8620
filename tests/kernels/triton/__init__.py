"""The Triton kernels in Triton's interpreter. `tests/kernels/test_triton_interpreted.py` runs these files."""
