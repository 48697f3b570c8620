"""What launches kernels on a GPU, and the kernels, in Triton."""
