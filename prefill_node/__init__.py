"""The prefill node: prompts in, KV blocks published under their names, first tokens out."""
