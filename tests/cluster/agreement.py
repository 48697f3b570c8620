"""Compares the greedy tokens of a cluster with those of transformers."""

import asyncio
from collections.abc import Sequence

from tests.cluster.cluster import Cluster, Served
from tests.engine.reference import Reference


async def check_agrees(
    running: Cluster, reference: Reference, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[Served]:
    """Asserts that the cluster, given all prompts at the same time, answers what the reference answers. Returns its
    answers."""
    served = await asyncio.gather(*(running.generate(prompt, max_tokens=max_tokens) for prompt in prompts))
    for prompt, result in zip(prompts, served, strict=True):
        assert result.tokens[0] == reference.generate(prompt, max_tokens), f"prompt of {len(prompt)} tokens"
        assert result.how.prefill_node == "prefill-0"
    return served
