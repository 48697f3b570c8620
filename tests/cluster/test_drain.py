"""A node that is told to stop finishes its requests and leases, and gets no new ones."""

import asyncio
from pathlib import Path

import pytest

from router.nodes.node import NodeState
from tests.cluster.cluster import Cluster, cluster
from tests.cluster.prompts import prompt_of
from tests.engine.reference import Reference


async def known_as(running: Cluster, node_id: str, state: NodeState) -> None:
    """Returns once the router sees the node in this state."""
    handle = next(node for node in running.registry.nodes if node.name.startswith(node_id))
    async with asyncio.timeout(20):
        while handle.state is not state:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_draining_node_ends_what_it_has_and_the_others_take_over(
    role: str, model: Path, reference: Reference
) -> None:
    async with cluster(model, prefill_nodes=2, decode_nodes=2) as running:
        prompts = [prompt_of(60, i) for i in range(4)]
        streams = [asyncio.create_task(running.generate(prompt, max_tokens=300)) for prompt in prompts]
        server = running.servers[f"{role}-0"]
        async with asyncio.timeout(20):
            while sum(len(node.activity) for node in running.nodes[2:]) < 4:
                await asyncio.sleep(0.001)
        drained = asyncio.create_task(server.drain(timeout=30.0))
        await known_as(running, f"{role}-0", NodeState.DRAINING)
        later = await asyncio.gather(*(running.generate(prompt_of(50, 10 + i), max_tokens=4) for i in range(4)))
        used = {served.how.prefill_node if role == "prefill" else served.how.decode_node for served in later}
        assert used == {f"{role}-1"}
        for prompt, stream in zip(prompts, streams, strict=True):
            served = await stream
            assert served.tokens[0] == reference.generate(prompt, 300)
            if role == "decode":  # it had all of them; some may have reached the prefill node when it began to drain
                assert served.how.num_migrations == 0, "the node itself has ended it"
        await drained


async def test_the_drain_timeout_ends_a_drain(model: Path) -> None:
    async with cluster(model) as running:
        stream = asyncio.create_task(running.generate(prompt_of(60), max_tokens=3000))
        async with asyncio.timeout(20):
            while not running.node("decode-0").activity:
                await asyncio.sleep(0.001)
        async with asyncio.timeout(10):
            await running.servers["decode-0"].drain(timeout=0.05)
        running.relay.abort("r1")
        with pytest.raises(Exception, match="aborted"):
            await stream
