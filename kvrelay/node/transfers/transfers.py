"""Chooses how a node's KV moves, and makes the connectors for it. A connector is used once its self-test has passed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kv_connector.base import KVConnector
from kv_connector.device.self_test import check_direct
from kv_connector.registry import create_connector, create_direct, is_installed
from kv_connector.self_test import SelfTestReport, check_connector
from kv_connector.settings import (
    LOOPBACK_DEVICE,
    ConnectorSettings,
    RedisSettings,
    SharedMemorySettings,
    UcxSettings,
)
from kv_connector.tiered import TieredConnector
from kvrelay.core.process.listening import is_loopback, numeric_address
from kvrelay.node.prefill_rate import PrefillRate
from kvrelay.node.settings import NodeSettings
from kvrelay.node.transfers.block_copy import choose_copy
from kvrelay.node.transfers.connector_choice import ConnectorChoice, choose_connectors, choose_working, log_choice
from kvrelay.node.transfers.device_transfer import choose_direct
from kvrelay.node.transfers.pool import NodePool, PoolPlan, make_direct_pool, make_pool
from kvrelay.node.transfers.transfer_probe import TRANSFER_PROBE

_SELF_TEST_TTL = 10  # seconds
_LOOPBACK = "127.0.0.1"  # the only address of loopback that UCX finds an interface for


@dataclass(frozen=True, slots=True)
class Transfers:
    """How blocks leave the node and arrive: `connector` moves them, through host memory or from device to device, and
    `make_pool` makes the pool that it serves. Whoever holds this closes `connector` unless a node owns it."""

    connector: KVConnector
    make_pool: Callable[[PoolPlan, torch.device], NodePool]


async def choose_transfers(settings: NodeSettings, device: torch.device, prefill_rate: PrefillRate) -> Transfers:
    """Returns the transfers through the connectors that are set, or chosen, and pass their self-test."""
    connector_settings = connector_settings_of(settings)
    reached_at = settings.ucx_host or numeric_address(settings.host)

    def choose(broken: Mapping[str, str]) -> ConnectorChoice:
        return choose_connectors(
            settings.connector,
            host=reached_at,
            ucx_installed=is_installed("ucx"),
            has_secret=bool(settings.cluster_secret.get_secret_value()),
            broken=broken,
        )

    async def check(name: str) -> SelfTestReport:
        redis = replace(connector_settings.redis, ttl_seconds=_SELF_TEST_TTL, key_prefix="kvrelay-self-test")
        scratch = replace(connector_settings, redis=redis)
        return await check_connector(lambda: create_connector(name, scratch))

    choice = await choose_working(choose, check)
    log_choice(choice, settings)
    direct = await _direct(settings, device, choice.names, connector_settings)
    if direct:
        device_tiers = TieredConnector([create_direct(name, connector_settings) for name in direct])
        return Transfers(device_tiers, partial(make_direct_pool, device_tiers))
    host_tiers = TieredConnector(
        [create_connector(name, connector_settings) for name in choice.names], recompute_seconds=prefill_rate.seconds
    )
    return Transfers(host_tiers, partial(make_pool, host_tiers))


async def _direct(
    settings: NodeSettings, device: torch.device, names: Sequence[str], connector_settings: ConnectorSettings
) -> tuple[str, ...]:
    """Returns the connectors that move KV from device to device; none for a node without a GPU, or one that stages."""
    if settings.kv_device_transfer == "staged" or device.type == "cpu":
        return ()
    from kvrelay.node.transfers.cuda_pool import cuda_scratch, problem_with_direct

    async def check(name: str) -> SelfTestReport:
        return await check_direct(name, connector_settings, cuda_scratch, probe=TRANSFER_PROBE)

    required = settings.kv_device_transfer == "direct"
    return await choose_direct(names, check, required=required, problem=problem_with_direct())


def connector_settings_of(settings: NodeSettings) -> ConnectorSettings:
    ucx_host = settings.ucx_host or (_LOOPBACK if is_loopback(numeric_address(settings.host)) else settings.host)
    return ConnectorSettings(
        ucx=UcxSettings(
            cluster_secret=settings.cluster_secret.get_secret_value(),
            host=ucx_host,
            net_devices=settings.ucx_net_devices or (LOOPBACK_DEVICE if is_loopback(ucx_host) else ""),
        ),
        shared_memory=SharedMemorySettings(settings.shared_memory_dir or None),
        redis=RedisSettings(url=settings.redis_url.get_secret_value(), ttl_seconds=settings.redis_ttl),
        copy=choose_copy(),
    )
