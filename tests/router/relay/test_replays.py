"""A lost node may have had hundreds of long outputs: while they are placed again, the event loop turns."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvrelay.core.errors import CancelledByPeerError, DeadlineError, KVRelayError
from kvrelay.core.generation.outputs import FinishReason
from router.request import RequestEvent
from tests.loop_turns import counting_turns
from tests.router.routed import a_request, assert_idle, collected, expire, say
from tests.router.scripted_cluster import Cluster, cluster
from tests.router.scripted_nodes import soon, token, until

NUM_OUTPUTS = 8


async def all_at_the_first_node(nodes: Cluster, *names: str) -> list[asyncio.Task[list[RequestEvent]]]:
    """Begins requests, and returns once each of their outputs has a token of the first decode node."""
    nodes.decodes[1].update(1, num_queued_tokens=100_000)
    await until(lambda: nodes.registry.decode[1].load.num_queued_tokens > 0)
    running = []
    for name in names:
        running.append(asyncio.create_task(collected(nodes, a_request(name, n=NUM_OUTPUTS))))
        wire_id = (await nodes.decode.admit()).request_id
        say(nodes.decode, wire_id, *(token(7, index=index) for index in range(NUM_OUTPUTS)))
    runs = nodes.relay._running.values()
    await until(lambda: all(tokens for run in runs for tokens in run._tokens.values()))
    return running


def observe_placements(nodes: Cluster, monkeypatch: pytest.MonkeyPatch, seen: Callable[[], object]) -> None:
    """Has `seen` called whenever something has been placed."""
    place = nodes.placer.place

    def observed(*args: Any, **kwargs: Any) -> Any:
        placement = place(*args, **kwargs)
        seen()
        return placement

    monkeypatch.setattr(nodes.placer, "place", observed)


@pytest.mark.parametrize("has_waited", [False, True])
async def test_each_output_of_a_lost_node_is_placed_in_a_turn_of_its_own(
    has_waited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when all have waited for a node, and one has come."""
    async with cluster(num_decode_nodes=2, local_prefill_max_tokens=64) as nodes, counting_turns() as num_turns:
        names = ("a", "b", "c")
        running = await all_at_the_first_node(nodes, *names)
        placed_at: list[int] = []
        if has_waited:
            await nodes.decodes[1].stop()
            await nodes.decode.stop()
            await until(lambda: not nodes.registry.can_serve())
            runs = nodes.relay._running.values()
            await until(lambda: all(group.wait is not None for run in runs for group in run._groups))
            await nodes.decodes[1].start_again(epoch=2)
        else:
            nodes.decode.end_stream()
        observe_placements(nodes, monkeypatch, lambda: placed_at.append(num_turns()))
        for _ in range(len(names) * NUM_OUTPUTS):
            admit = await nodes.decodes[1].admit()
            index = admit.first_choice_index
            say(nodes.decodes[1], admit.request_id, token(8, index=index, finish=FinishReason.LENGTH))
        for task in running:
            assert len(await task) == 2 * NUM_OUTPUTS + 1
        assert len(placed_at) == len(set(placed_at)) == len(names) * NUM_OUTPUTS
        assert_idle(nodes)


@pytest.mark.parametrize(
    ("end", "error"),
    [(lambda nodes: nodes.relay.abort("r"), CancelledByPeerError), (expire, DeadlineError)],
)
async def test_a_request_that_ends_while_its_outputs_wait_for_their_turn_is_not_placed_again(
    end: Callable[[Cluster], None], error: type[KVRelayError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(num_decode_nodes=2, local_prefill_max_tokens=64) as nodes:
        [running] = await all_at_the_first_node(nodes, "r")
        num_placed = 0

        def end_soon() -> None:
            nonlocal num_placed
            num_placed += 1
            if num_placed == 2:
                asyncio.get_running_loop().call_soon(end, nodes)

        observe_placements(nodes, monkeypatch, end_soon)
        nodes.decode.end_stream()
        with pytest.raises(error):
            await running
        assert num_placed == 2
        assert_idle(nodes)


async def test_a_client_that_leaves_while_its_outputs_wait_for_their_turn_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with cluster(num_decode_nodes=2, local_prefill_max_tokens=64) as nodes:
        leaves, stays = await all_at_the_first_node(nodes, "leaves", "stays")
        observe_placements(nodes, monkeypatch, leaves.cancel)
        nodes.decode.end_stream()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        assert list(nodes.relay._running) == ["stays"]
        while nodes.relay._running:
            command = await soon(nodes.decodes[1].commands)
            if command.HasField("admit"):
                index = command.admit.first_choice_index
                say(nodes.decodes[1], command.admit.request_id, token(8, index=index, finish=FinishReason.LENGTH))
            await until(lambda: not (nodes.relay._running and nodes.decodes[1].commands.empty()))
        assert len(await stays) == 2 * NUM_OUTPUTS + 1
        assert_idle(nodes)
