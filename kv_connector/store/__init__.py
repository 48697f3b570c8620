"""The connectors to a store that outlives nodes."""
