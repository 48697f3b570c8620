"""Makes a node from settings: an engine and a connector over one pool."""

import asyncio
import logging
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial

from kvrelay.core.model.directory import resolve_model_directory
from kvrelay.core.model.vocabulary import vocabulary_digest
from kvrelay.core.node_report import NodeRole
from kvrelay.core.process.core_table import CoreShare, CoreTable
from kvrelay.core.process.listening import address_of
from kvrelay.engine.engine import Engine
from kvrelay.engine.engine_thread import EngineThread
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.startup import PreparedEngine, default_threads, planned_device, prepare_engine
from kvrelay.node.node import Node, NodeIdentity
from kvrelay.node.prefill_rate import PrefillRate
from kvrelay.node.settings import NodeSettings
from kvrelay.node.transfers.pool import NodePool, PoolPlan
from kvrelay.node.transfers.transfers import Transfers, choose_transfers

_logger = logging.getLogger(__name__)


async def build_node(settings: NodeSettings, role: NodeRole) -> Node:
    """Loads the model and returns a node around it. Called on the node's loop, before the node serves. If it is
    cancelled, it closes what it has opened, but its thread goes on loading, or building over a pool that peers do not
    find any more. Raises ModelLoadError or ConfigurationError."""
    options = _engine_options(settings)
    device = await asyncio.to_thread(planned_device, options)
    prefill_rate = PrefillRate()
    transfers = await choose_transfers(settings, device, prefill_rate)
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


def _identity(settings: NodeSettings, role: NodeRole, prepared: PreparedEngine, vocabulary: bytes) -> NodeIdentity:
    config = prepared.loaded.config
    return NodeIdentity(
        node_id=settings.node_id or _default_id(settings, role),
        epoch=secrets.randbits(63) | 1,
        kv_namespace=prepared.namespace,
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(sorted(set(config.eos_token_ids))),
        vocabulary=vocabulary,
    )


def _default_id(settings: NodeSettings, role: NodeRole) -> str:
    """Returns an id that no other node of this host has. At a port that is set it is the same after each start."""
    place = address_of(settings.host, settings.port) if settings.port else secrets.token_hex(3)
    return f"{role.value}-{socket.gethostname()}-{place}"


def _pool(settings: NodeSettings, identity: NodeIdentity, prepared: PreparedEngine, transfers: Transfers) -> NodePool:
    """Makes the pool on the loop, which some connectors need for it. Reserving much memory takes seconds."""
    staging_bytes = int(settings.kv_staging_gib * 2**30)
    plan = PoolPlan(prepared.layout, prepared.size.num_blocks, staging_bytes, identity.node_id, identity.epoch)
    return transfers.make_pool(plan, prepared.device)


def _build(prepared: PreparedEngine, pool: NodePool, core_share: CoreShare) -> Engine:
    """Builds the engine, which takes long where kernels are compiled and steps recorded."""
    return prepared.build(
        pool.tensor, retract=pool.connector.retract, publish=True, publish_hits=pool.forgets, core_share=core_share
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
