"""What computes on the CPU: the compiled kernels and the order of the weights that they read."""
