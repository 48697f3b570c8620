"""What a node is told reaches what it is made of: the engine, its fetches, and the plan of its pool."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decode_node.service import DecodeService
from kv_connector.base import HostConnector
from kvrelay.core.node_report import NodeRole
from kvrelay.node import startup
from kvrelay.node.settings import NodeSettings
from kvrelay.node.transfers import pool, transfers
from kvrelay.node.transfers.pool import NodePool, PoolPlan
from tests.engine.tiny_models import make_tiny_model
from tests.node.fake_node import serving


async def test_settings_reach_the_engine_its_fetches_and_its_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All values differ from each other and from the defaults."""
    plans: list[PoolPlan] = []

    def make_pool(backend: HostConnector, plan: PoolPlan, device: torch.device) -> NodePool:
        plans.append(plan)
        return pool.make_pool(backend, plan, device)

    monkeypatch.setattr(transfers, "make_pool", make_pool)
    (tmp_path / "pools").mkdir()
    given: dict[str, Any] = {
        "model": str(make_tiny_model("llama", tmp_path / "model", vocab_size=320)),
        "connector": "shared_memory",
        "shared_memory_dir": str(tmp_path / "pools"),
        "port": 7001,
        "device": "cpu",
        "threads": 1,
        "dtype": "float32",
        "block_size": 8,
        "num_blocks": 77,
        "max_model_len": 200,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 48,
        "max_num_mixed_tokens": 24,
        "scheduling_policy": "priority",
        "fetch_timeout": 7.0,
        "kv_staging_gib": 1.5,
    }
    node = await startup.build_node(NodeSettings.model_validate(given), NodeRole.DECODE)
    async with serving(DecodeService, node):
        config, fetches = node.engine_config, node._reception
        assert (config.policy, config.max_num_seqs, config.block_size, config.max_model_len) == ("priority", 3, 8, 200)
        assert (config.max_num_batched_tokens, config.max_num_mixed_tokens) == (48, 24)
        assert (fetches.fetch_timeout, fetches.patience) == (7.0, 14.0)
        assert node.num_host_blocks == 77
        assert node.identity.node_id.endswith("-127.0.0.1:7001")
    [plan] = plans
    assert (plan.num_blocks, plan.staging_bytes) == (77, 3 << 29)
