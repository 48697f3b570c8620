"""The decoder of the Llama family and its configuration."""
