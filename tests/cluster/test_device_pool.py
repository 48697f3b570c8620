"""Nodes whose KV is in the memory of a device, which connectors reach only by copies: the tokens are the same, and the
pools are whole afterwards."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kv_connector.base import HostConnector
from kv_connector.device.base import DeviceConnector
from kv_connector.device.memory import BlockCopy
from kv_connector.device.staged import StagedConnector
from kv_connector.tiered import TieredConnector
from kvrelay.core.errors import ConfigurationError
from kvrelay.engine.kv_pool import pool_over
from kvrelay.node.transfers import transfers
from kvrelay.node.transfers.pool import NodePool, PoolPlan, serve_directly, stage
from tests.cluster.cluster import cluster
from tests.cluster.prompts import prompt_of
from tests.engine.reference import Reference
from tests.kv_connector.device.direct_device import DirectDevice
from tests.kv_connector.device.slow_device import SlowDevice


def on_device(backend: HostConnector, plan: PoolPlan, device: torch.device) -> NodePool:
    """Makes a pool as `make_pool` does on a GPU. The engine's tensor is the device's memory; the connector has only the
    device."""
    memory = SlowDevice(plan.num_blocks, plan.layout.block_bytes)
    memory.starting = True
    connector = stage(backend, plan, memory)
    memory.starting = False
    return NodePool(pool_over(memory.memory, plan.layout, plan.num_blocks), connector, connector.forgets)


def directly(tiers: TieredConnector[DeviceConnector], plan: PoolPlan, device: torch.device) -> NodePool:
    """Makes a pool as `make_direct_pool` does on a GPU."""
    memory = DirectDevice(plan.num_blocks, plan.layout.block_bytes)
    connector = serve_directly(tiers, plan, memory)
    return NodePool(pool_over(memory.memory, plan.layout, plan.num_blocks), connector, forgets=False)


@pytest.mark.parametrize(("connector", "slots"), [("shared_memory", 1000), ("shared_memory", 16), ("ucx", 16)])
async def test_transfers_staged_through_the_host_change_no_token(
    connector: str, slots: int, model: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16 slots the staging area holds only a part of a prompt of 44 blocks. What peers do not find there any more
    is computed again."""

    def make_pool(backend: HostConnector, plan: PoolPlan, device: torch.device) -> NodePool:
        return on_device(backend, replace(plan, staging_bytes=slots * plan.layout.block_bytes), device)

    monkeypatch.setattr(transfers, "make_pool", make_pool)
    async with cluster(model, connector=connector, max_num_batched_tokens=64) as running:
        for prompt in (prompt_of(1), prompt_of(100), prompt_of(700), [*prompt_of(100), 5, 6, 7]):
            result = await running.generate(prompt, max_tokens=8)
            assert result.tokens == {0: reference.generate(prompt, 8)}
        await running.wait_idle()
        moved = [device_of(node.connector).num_from_host for node in running.nodes]
        assert moved[1] > 0, "the decode node has received blocks"


@pytest.mark.parametrize("direct", ["cuda_ipc", "ucx", "cuda_ipc,ucx"])
async def test_direct_transfers_between_devices_change_no_token(
    direct: str, model: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def choose(*_: object) -> tuple[str, ...]:
        return tuple(direct.split(","))

    monkeypatch.setattr(transfers, "_direct", choose)
    monkeypatch.setattr(transfers, "make_direct_pool", directly)
    async with cluster(model, connector="shared_memory,ucx", max_num_batched_tokens=64) as running:
        for prompt in (prompt_of(100), prompt_of(700)):
            result = await running.generate(prompt, max_tokens=8)
            assert result.tokens == {0: reference.generate(prompt, 8)}
        await running.wait_idle()
        decode = running.nodes[1].connector
        assert decode.name == direct
        assert sum(stats.blocks_fetched for stats in decode.all_stats().values()) >= 44


def device_of(connector: object) -> SlowDevice:
    assert isinstance(connector, StagedConnector) and isinstance(connector._memory, SlowDevice)
    return connector._memory


class Forgetful(SlowDevice):
    """A device that stores nothing."""

    def from_host(self, copies: Sequence[BlockCopy]) -> None:
        return


async def test_a_device_that_copies_wrongly_fails_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_pool(backend: HostConnector, plan: PoolPlan, device: torch.device) -> NodePool:
        memory = Forgetful(plan.num_blocks, plan.layout.block_bytes)
        memory.starting = True
        stage(backend, plan, memory)
        raise AssertionError("it passed")

    monkeypatch.setattr(transfers, "make_pool", make_pool)
    with pytest.raises(ConfigurationError, match="4 of 4 blocks arrived with other bytes"):
        async with cluster(model):
            pass
