"""Whatever happens to nodes and transfers, a request gives the tokens that one undisturbed node gives."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.policies.choice import make_policy
from tests.cluster.cluster import Cluster, Served, cluster

SAMPLED: dict[str, Any] = {
    "max_tokens": 60,
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 77,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.6,
    "min_tokens": 50,
    "ignore_eos": False,
    "logprobs": 2,
}
PARALLEL: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 5, "n": 3}


async def serve_undisturbed(
    model: Path, prompt: Sequence[int], samplings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Served]:
    """Returns what a cluster of one node answers, by the name of the sampling."""
    async with cluster(model, prefill_nodes=0) as running:
        return {name: await running.generate(prompt, **sampling) for name, sampling in samplings.items()}


@asynccontextmanager
async def nodes(model: Path, prefill_nodes: int, decode_nodes: int, **settings: Any) -> AsyncIterator[Cluster]:
    """Runs a cluster in which the first request goes to prefill-0 and decode-0, and the second one to the next
    nodes."""
    policy = make_policy("round_robin", local_prefill_max_tokens=0)
    async with cluster(
        model, prefill_nodes=prefill_nodes, decode_nodes=decode_nodes, policy=policy, **settings
    ) as running:
        yield running


async def killed_after(running: Cluster, prompt: Sequence[int], num_tokens: int, **sampling: Any) -> Served:
    """Serves the first request, whose decode node dies when the client has so many tokens; it generates no more."""
    gate = running.hold("decode-0", num_tokens=num_tokens)

    async def kill() -> None:
        await running.kill("decode-0")
        gate.set()

    return await served_with(running, prompt, kill, num_tokens, **sampling)


async def served_with(
    running: Cluster,
    prompt: Sequence[int],
    interfere: Callable[[], Coroutine[Any, Any, None]],
    num_tokens: int = 1,
    **sampling: Any,
) -> Served:
    """Serves a request, and calls `interfere` when the client has so many tokens. Waits for both to end."""
    interfering: list[asyncio.Task[None]] = []

    def on_tokens(count: int) -> None:
        if count >= num_tokens and not interfering:
            interfering.append(asyncio.create_task(interfere()))

    try:
        return await running.generate(prompt, on_tokens=on_tokens, **sampling)
    finally:
        await asyncio.gather(*interfering)


def check_same(served: Served, expected: Served) -> None:
    assert served.tokens == expected.tokens
    for index, entries in expected.logprobs.items():
        assert [entry.token_id for entry in served.logprobs[index]] == [entry.token_id for entry in entries]
        for found, entry in zip(served.logprobs[index], entries, strict=True):
            assert found.logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in entry.top]
