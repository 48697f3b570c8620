"""The connector over UCX, which uses RDMA, shared memory or TCP, whichever reaches the peer."""
