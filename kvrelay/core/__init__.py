"""Words that every process shares. Nothing here imports torch."""
