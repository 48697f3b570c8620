"""The prefill node: it computes prompts, publishes their KV blocks by name, and returns the first tokens."""
