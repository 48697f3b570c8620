"""What the router's log says of how long requests may be, which the live nodes decide together."""

import logging

import pytest

from router.nodes.node import NodeState
from tests.router.scripted_cluster import registered
from tests.router.scripted_nodes import ScriptedDecode, until


async def test_the_log_names_the_node_that_allows_the_shortest_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Once for each change, also when that node is gone."""
    decode, short = ScriptedDecode(), ScriptedDecode("short")
    short.max_model_len = 256
    with caplog.at_level(logging.INFO):
        async with registered(decode, late=short) as registry:
            first, second = registry.decode
            await until(lambda: first.state is NodeState.LIVE)
            await short.start()
            await until(lambda: second.state is NodeState.LIVE)
            await decode.stop()
            await until(lambda: first.state is NodeState.LOST)
            await decode.start_again(epoch=2)
            await until(lambda: first.state is NodeState.LIVE)
            await short.stop()
            await until(lambda: second.state is NodeState.LOST)
            limits = ((4096, first.name), (256, second.name), (4096, first.name))
    expected = [
        f"requests may have {limit} tokens now, prompt included: {name} takes no more" for limit, name in limits
    ]
    assert [message for message in caplog.messages if message.startswith("requests may have")] == expected
