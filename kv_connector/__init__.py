"""Moving KV blocks between nodes by name. Importing this package imports no backend and no backend's library."""
