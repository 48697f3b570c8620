"""The kernels for CPUs and GPUs: attention over the paged KV pool, linear layers, fused rows, sampling, and digests of
blocks of KV.

Imports nothing else of kvrelay.
"""
