"""Prompts for the tiny models, drawn by length and seed."""

import random

VOCAB_SIZE = 320


def prompt_of(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(vocab_size) for _ in range(length)]
