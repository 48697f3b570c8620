"""The decode node: it fetches KV blocks by name and streams tokens, computed with continuous batching."""
