"""KV in a store that outlives nodes."""
