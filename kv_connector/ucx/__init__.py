"""KV through UCX: RDMA, shared memory or TCP, whatever reaches the peer."""
