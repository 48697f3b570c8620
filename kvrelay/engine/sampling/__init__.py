"""Sampling: from logits to tokens, as a pure function of a row and its request."""
