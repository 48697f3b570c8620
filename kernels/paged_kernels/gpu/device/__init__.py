"""Device code: Triton kernels and the functions they share. A name that ends in `_kernel` is launched from the host.

Invariant: no kernel computes an element offset into the KV pool in 32 bits, and none reads a slot that no token of
its sequence has written. What differs from step to step specialises no kernel, so that none is compiled while somebody
waits for a token.
"""
