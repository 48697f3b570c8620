"""From settings to a running node: load the model, size the pool, join engine and connector. Logs each step as it
goes.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from paged_kernels.base import AttentionBackend
from paged_kernels.registry import select_backend

from kv_connector.base import KVConnector
from kv_connector.registry import create_connector
from kv_connector.settings import ConnectorSettings, RedisSettings, SharedMemorySettings, UcxSettings
from kvrelay.core.block_hash import KVNamespace
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv_layout import KVLayout
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.engine import Engine
from kvrelay.engine.model_runner import ModelRunner
from kvrelay.engine.models.loader import LoadedModel, load_model
from kvrelay.engine.sampler import Sampler
from kvrelay.engine.scheduler import SchedulerConfig
from kvrelay.node.node import Node, NodeIdentity
from kvrelay.node.settings import NodeSettings

_logger = logging.getLogger(__name__)
_DEFAULT_POOL_BYTES = 1 << 30
_LARGEST_DEFAULT_SHARE = 0.5  # of free memory, for the pool that nobody asked to be larger
_PROGRESS_SECONDS = 1.0
_LOOPBACK_DEVICE = "lo"  # a node that listens on loopback opens no port to the network


@dataclass(frozen=True, slots=True)
class PoolSize:
    """What fits: `num_blocks` in the pool, and the longest sequence that is promised."""

    num_blocks: int
    max_model_len: int


def build_node(settings: NodeSettings, role: str) -> Node:
    """Loads and joins everything; call on the node's loop before it serves. Raises ModelLoadError or
    ConfigurationError.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    attention = select_backend(settings.attention_backend)
    loaded = _load(settings, attention)
    layout = KVLayout(
        num_kv_heads=loaded.config.num_kv_heads,
        num_layers=loaded.config.num_layers,
        block_size=settings.block_size,
        head_dim=loaded.config.head_dim,
        dtype=str(loaded.dtype).removeprefix("torch."),
    )
    size = size_pool(settings, layout, model_limit=loaded.max_model_len, free_bytes=free_memory())
    node_id = settings.node_id or f"{role}-{socket.gethostname()}-{secrets.token_hex(3)}"
    epoch = secrets.randbits(63) | 1
    connector = create_connector(settings.connector, _connector_settings(settings))
    engine = _build_engine(settings, loaded, layout, size, connector, node_id=node_id, epoch=epoch)
    identity = NodeIdentity(
        node_id=node_id,
        epoch=epoch,
        model=settings.model,
        kv_namespace=_namespace(loaded, layout),
        block_bytes=layout.block_bytes,
        vocab_size=loaded.config.vocab_size,
    )
    _logger.info(
        "%s: %d blocks of %d tokens (%.2f GiB), max_model_len %d, attention %s, connector %s",
        node_id, size.num_blocks, layout.block_size, size.num_blocks * layout.block_bytes / 2**30,
        size.max_model_len, attention.name, connector.name,
    )  # fmt: skip
    return Node(identity, engine, connector)


def _load(settings: NodeSettings, attention: AttentionBackend) -> LoadedModel:
    _logger.info("loading %s", settings.model)
    loaded = load_model(
        settings.model,
        dtype=settings.dtype,
        attention=attention,
        max_model_len=settings.max_model_len or None,
        quantization=settings.quantization,
        progress=_progress_logger(),
    )
    quantized = "" if settings.quantization == "none" else f", weights as {settings.quantization}"
    _logger.info("loaded in %.1f s as %s%s", loaded.load_seconds, loaded.dtype, quantized)
    return loaded


def _progress_logger() -> Callable[[int, int], None]:
    """Says how far loading is, about once a second."""
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PROGRESS_SECONDS:
            last = now
            _logger.info("loaded %.1f of %.1f GB (%d%%)", done / 1e9, total / 1e9, 100 * done // max(1, total))

    return progress


def _connector_settings(settings: NodeSettings) -> ConnectorSettings:
    ucx_host = settings.ucx_host or settings.host
    return ConnectorSettings(
        ucx=UcxSettings(
            cluster_secret=settings.cluster_secret.get_secret_value(),
            host=ucx_host,
            net_devices=settings.ucx_net_devices or (_LOOPBACK_DEVICE if ucx_host.startswith("127.") else ""),
        ),
        shared_memory=SharedMemorySettings(directory=settings.shared_memory_dir or None),
        redis=RedisSettings(url=settings.redis_url.get_secret_value(), ttl_seconds=settings.redis_ttl),
    )


def _namespace(loaded: LoadedModel, layout: KVLayout) -> KVNamespace:
    return KVNamespace(
        model_fingerprint=loaded.fingerprint,
        kv_dtype=layout.dtype,
        layout_id=layout.layout_id,
        block_size=layout.block_size,
    )


def _build_engine(
    settings: NodeSettings,
    loaded: LoadedModel,
    layout: KVLayout,
    size: PoolSize,
    connector: KVConnector,
    *,
    node_id: str,
    epoch: int,
) -> Engine:
    buffer = connector.allocate(layout, size.num_blocks, node_id=node_id, epoch=epoch)
    kv_pool = torch.frombuffer(buffer.memory, dtype=loaded.dtype).view(size.num_blocks, *layout.block_shape)
    config = SchedulerConfig(
        block_size=layout.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=size.max_model_len,
        policy=settings.scheduling_policy,
    )
    return Engine(
        config,
        ModelRunner(loaded.model, Sampler(loaded.config.vocab_size, loaded.config.eos_token_ids), kv_pool),
        BlockPool(size.num_blocks, on_evict=connector.retract),
        _namespace(loaded, layout),
        eos_token_ids=loaded.config.eos_token_ids,
        publish=True,
    )


def free_memory() -> int:
    """Bytes of RAM that could be used now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def size_pool(settings: NodeSettings, layout: KVLayout, *, model_limit: int, free_bytes: int) -> PoolSize:
    """How many blocks, and how long a sequence may be. The pool always holds at least one sequence of max_model_len
    tokens.

    An explicit `max_model_len` that does not fit raises ConfigurationError; the model's own limit is lowered to what
    fits.
    """
    wanted = settings.max_model_len or model_limit
    if settings.max_model_len > model_limit:
        raise ConfigurationError(
            f"--max-model-len {settings.max_model_len} is more than the model can do; lower it to {model_limit}"
        )
    num_blocks = settings.num_blocks
    if not num_blocks and settings.gpu_memory_utilization:
        num_blocks = int(free_bytes * settings.gpu_memory_utilization) // layout.block_bytes
    if not num_blocks:
        pool_bytes = max(_DEFAULT_POOL_BYTES, layout.num_blocks_for(wanted) * layout.block_bytes)
        num_blocks = int(min(pool_bytes, free_bytes * _LARGEST_DEFAULT_SHARE)) // layout.block_bytes
    fits = num_blocks * layout.block_size
    if fits < wanted and settings.max_model_len:
        raise ConfigurationError(
            f"a sequence of {wanted} tokens needs {layout.num_blocks_for(wanted)} blocks, the pool has {num_blocks}; "
            f"lower --max-model-len to {fits}, or raise --num-blocks or --gpu-memory-utilization"
        )
    if fits < wanted:
        _logger.warning("max_model_len is %d instead of the model's %d: the pool holds no more", fits, wanted)
    max_model_len = min(wanted, fits)
    if max_model_len < 2:
        raise ConfigurationError(f"a pool of {num_blocks} blocks holds no sequence; raise --num-blocks")
    return PoolSize(num_blocks, max_model_len)
