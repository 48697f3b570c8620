"""KV in segments of shared memory that the nodes of one host map."""
