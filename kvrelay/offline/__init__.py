"""The engine without a cluster: prompts in, texts out, in the caller's own process."""
