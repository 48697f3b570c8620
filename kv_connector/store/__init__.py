"""The connector to a store that outlives nodes: Redis."""
