"""Makes a node from settings: an engine and a connector over one pool."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from kv_connector.base import KVConnector
from kv_connector.device.self_test import check_direct
from kv_connector.registry import create_connector, create_direct, is_installed
from kv_connector.self_test import SelfTestReport, check_connector
from kv_connector.settings import ConnectorSettings, RedisSettings, SharedMemorySettings, UcxSettings
from kv_connector.tiered import TieredConnector
from kvrelay.core.model.directory import resolve_model_directory
from kvrelay.core.model.vocabulary import vocabulary_digest
from kvrelay.core.node_report import NodeRole
from kvrelay.core.process.core_table import CoreShare, CoreTable
from kvrelay.core.process.listening import is_loopback, numeric_address
from kvrelay.engine.engine import Engine
from kvrelay.engine.engine_thread import EngineThread
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.startup import PreparedEngine, default_threads, planned_device, prepare_engine
from kvrelay.node.block_copy import choose_copy
from kvrelay.node.connector_choice import ConnectorChoice, choose_connectors, choose_working, log_choice
from kvrelay.node.device_transfer import choose_direct
from kvrelay.node.node import Node, NodeIdentity
from kvrelay.node.pool import NodePool, PoolPlan, make_direct_pool, make_pool
from kvrelay.node.prefill_rate import PrefillRate
from kvrelay.node.settings import NodeSettings
from kvrelay.node.transfer_probe import TRANSFER_PROBE

_logger = logging.getLogger(__name__)
_SELF_TEST_TTL = 10  # seconds
_LOOPBACK = "127.0.0.1"  # the only address of loopback that UCX finds an interface for
_LOOPBACK_DEVICE = "lo"  # so that a node that listens on loopback sends no KV over the network


async def build_node(settings: NodeSettings, role: NodeRole) -> Node:
    """Loads the model and returns a node around it. Called on the node's loop, before the node serves. If it is
    cancelled, it closes what it has opened, but its thread goes on loading, or building over a pool that peers do not
    find any more. Raises ModelLoadError or ConfigurationError."""
    options = _engine_options(settings)
    device = await asyncio.to_thread(planned_device, options)
    prefill_rate = PrefillRate()
    transfers = await _transfers(settings, device, prefill_rate)
    # A thread that ends. Torch's OpenMP keeps helper threads for every thread that has computed in parallel, and
    # libgomp counts them: if there are more than cores, the helpers of an engine that multiplies with torch sleep at
    # each barrier of a step instead of spinning.
    loading = ThreadPoolExecutor(1, thread_name_prefix="load")
    load = partial(asyncio.get_running_loop().run_in_executor, loading)
    try:
        vocabulary = await asyncio.to_thread(_vocabulary, settings.model)
        prepared = await load(prepare_engine, options, device)
        identity = _identity(settings, role, prepared, vocabulary)
        pool = _pool(settings, identity, prepared, transfers)
        engine = await load(_build, prepared, pool, _core_share(settings))
        return _join(settings, identity, prepared, pool, engine, prefill_rate)
    except BaseException:
        await transfers.connector.close()  # its memory may be a file
        raise
    finally:
        loading.shutdown(wait=False)


@dataclass(frozen=True, slots=True)
class _Transfers:
    """How blocks leave the node and arrive: `connector` moves them, through host memory or from device to device, and
    `make_pool` makes the pool that it serves. Whoever holds this closes `connector` unless a node owns it."""

    connector: KVConnector
    make_pool: Callable[[PoolPlan, torch.device], NodePool]


def _identity(settings: NodeSettings, role: NodeRole, prepared: PreparedEngine, vocabulary: bytes) -> NodeIdentity:
    return NodeIdentity(
        node_id=settings.node_id or f"{role.value}-{socket.gethostname()}-{secrets.token_hex(3)}",
        epoch=secrets.randbits(63) | 1,
        kv_namespace=prepared.namespace,
        vocab_size=prepared.loaded.config.vocab_size,
        vocabulary=vocabulary,
    )


def _pool(settings: NodeSettings, identity: NodeIdentity, prepared: PreparedEngine, transfers: _Transfers) -> NodePool:
    """Makes the pool on the loop, which some connectors need for it. Reserving much memory takes seconds."""
    staging_bytes = int(settings.kv_staging_gib * 2**30)
    plan = PoolPlan(prepared.layout, prepared.size.num_blocks, staging_bytes, identity.node_id, identity.epoch)
    return transfers.make_pool(plan, prepared.device)


def _build(prepared: PreparedEngine, pool: NodePool, core_share: CoreShare) -> Engine:
    """Builds the engine, which takes long where kernels are compiled and steps recorded."""
    return prepared.build(
        pool.tensor, on_evict=pool.connector.retract, publish=True, publish_hits=pool.forgets, core_share=core_share
    )


def _join(
    settings: NodeSettings,
    identity: NodeIdentity,
    prepared: PreparedEngine,
    pool: NodePool,
    engine: Engine,
    prefill_rate: PrefillRate,
) -> Node:
    layout, size = prepared.layout, prepared.size
    _logger.info(
        "%s: %d blocks of %d tokens (%.2f GiB), max_model_len %d, attention %s, connector %s",
        identity.node_id, size.num_blocks, layout.block_size, size.num_blocks * layout.block_bytes / 2**30,
        size.max_model_len, prepared.attention, pool.connector.name,
    )  # fmt: skip
    return Node(
        identity,
        engine,
        pool.connector,
        fetch_timeout=settings.fetch_timeout,
        prefill_rate=prefill_rate,
        num_host_blocks=size.num_blocks if prepared.device.type == "cpu" else 0,
        make_engine_thread=partial(EngineThread, stream_interval=settings.stream_interval),
    )


def _vocabulary(model: str) -> bytes:
    return vocabulary_digest(resolve_model_directory(model))


def _core_share(settings: NodeSettings) -> CoreShare:
    num_cores = settings.threads or default_threads()
    if not settings.core_table:
        return CoreShare(num_cores)
    descriptor, entry = map(int, settings.core_table.split(":"))
    return CoreShare(num_cores, CoreTable(descriptor), entry)


def _engine_options(settings: NodeSettings) -> EngineOptions:
    return EngineOptions(**{field.name: getattr(settings, field.name) for field in fields(EngineOptions)})


async def _transfers(settings: NodeSettings, device: torch.device, prefill_rate: PrefillRate) -> _Transfers:
    """Returns the transfers through the connectors that are set, or chosen, and pass their self-test."""
    connector_settings = _connector_settings(settings)
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
        return _Transfers(device_tiers, partial(make_direct_pool, device_tiers))
    host_tiers = TieredConnector(
        [create_connector(name, connector_settings) for name in choice.names], recompute_seconds=prefill_rate.seconds
    )
    return _Transfers(host_tiers, partial(make_pool, host_tiers))


async def _direct(
    settings: NodeSettings, device: torch.device, names: Sequence[str], connector_settings: ConnectorSettings
) -> tuple[str, ...]:
    """Returns the connectors that move KV from device to device; none for a node without a GPU, or one that stages."""
    if settings.kv_device_transfer == "staged" or device.type == "cpu":
        return ()
    from kvrelay.node.cuda_pool import cuda_scratch, problem_with_direct

    async def check(name: str) -> SelfTestReport:
        return await check_direct(name, connector_settings, cuda_scratch, probe=TRANSFER_PROBE)

    required = settings.kv_device_transfer == "direct"
    return await choose_direct(names, check, required=required, problem=problem_with_direct())


def _connector_settings(settings: NodeSettings) -> ConnectorSettings:
    ucx_host = settings.ucx_host or (_LOOPBACK if is_loopback(numeric_address(settings.host)) else settings.host)
    return ConnectorSettings(
        ucx=UcxSettings(
            cluster_secret=settings.cluster_secret.get_secret_value(),
            host=ucx_host,
            net_devices=settings.ucx_net_devices or (_LOOPBACK_DEVICE if is_loopback(ucx_host) else ""),
        ),
        shared_memory=SharedMemorySettings(settings.shared_memory_dir or None),
        redis=RedisSettings(url=settings.redis_url.get_secret_value(), ttl_seconds=settings.redis_ttl),
        copy=choose_copy(),
    )
