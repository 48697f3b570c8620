"""The decode node: KV blocks fetched by name, tokens out through continuous batching."""
