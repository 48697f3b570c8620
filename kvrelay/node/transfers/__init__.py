"""How KV leaves a node and comes to it: which connectors it has, and the pool that they serve."""
