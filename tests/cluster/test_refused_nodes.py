"""Real nodes of which a router refuses one, because an output would depend on where it runs."""

import asyncio
import json
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

from decode_node.service import DecodeService
from kvrelay.core.node_report import NodeRole
from kvrelay.node.server import NodeServer
from kvrelay.node.settings import NodeSettings
from kvrelay.node.startup import build_node
from router.nodes.kv_index import KVIndex
from router.nodes.node import NodeState
from router.nodes.registry import Registry


def ending_with(model: Path, directory: Path, *token_ids: int) -> Path:
    """Returns a copy of the model whose outputs end with these tokens."""
    shutil.copytree(model, directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": token_ids}))
    return directory


async def test_a_node_whose_model_ends_outputs_with_other_tokens_is_refused(model: Path, tmp_path: Path) -> None:
    """In which order its files name them does not matter."""
    models = [
        ending_with(model, tmp_path / "first", 7, 2),
        ending_with(model, tmp_path / "same", 2, 7, 2),
        ending_with(model, tmp_path / "other", 2, 7, 9),
    ]
    async with AsyncExitStack() as stack:
        addresses: list[str] = []
        for path in models:
            given = {"model": str(path), "connector": "shared_memory", "device": "cpu", "num_blocks": 8}
            node = await build_node(NodeSettings.model_validate(given), NodeRole.DECODE)
            server = NodeServer(node, DecodeService(node))
            stack.push_async_callback(server.close)
            addresses.append(f"127.0.0.1:{await server.start('127.0.0.1', 0)}")
        registry = Registry([], addresses, KVIndex(capacity=100), timeout=5.0, silence=5.0)
        stack.push_async_callback(registry.close)
        registry.start()
        async with asyncio.timeout(20.0):
            await registry.wait_settled()
        assert [found.state for found in registry.decode] == [NodeState.LIVE, NodeState.LIVE, NodeState.REFUSED]
        ours, _, theirs = (found.described for found in registry.decode)
    assert (ours.eos_token_ids, theirs.eos_token_ids) == ((2, 7), (2, 7, 9))
    assert ours.kv_namespace == theirs.kv_namespace, "their KV is the same"
