"""From settings to a node: an engine and a connector over one pool."""

import logging
import secrets
import socket
from dataclasses import fields

from kv_connector.base import KVConnector
from kv_connector.registry import create_tiers
from kv_connector.settings import ConnectorSettings, RedisSettings, SharedMemorySettings, UcxSettings
from kvrelay.engine.kv_pool import pool_over
from kvrelay.engine.startup import EngineOptions, prepare_engine
from kvrelay.node.connector_choice import choose_connectors, is_ucx_installed
from kvrelay.node.node import Node, NodeIdentity
from kvrelay.node.prefill_rate import PrefillRate
from kvrelay.node.settings import NodeSettings

_logger = logging.getLogger(__name__)
_LOOPBACK_DEVICE = "lo"  # a node that listens on loopback opens no port to the network


def build_node(settings: NodeSettings, role: str) -> Node:
    """Loads and joins everything; call on the node's loop before it serves. Raises ModelLoadError or
    ConfigurationError.
    """
    prepared = prepare_engine(_engine_options(settings))
    layout, size = prepared.layout, prepared.size
    node_id = settings.node_id or f"{role}-{socket.gethostname()}-{secrets.token_hex(3)}"
    epoch = secrets.randbits(63) | 1
    prefill_rate = PrefillRate()
    connector = _connector(settings, prefill_rate)
    buffer = connector.allocate(layout, size.num_blocks, node_id=node_id, epoch=epoch)
    kv_pool = pool_over(buffer.memory, layout, size.num_blocks)
    engine = prepared.build(kv_pool, on_evict=connector.retract, publish=True, publish_hits=connector.has_store)
    identity = NodeIdentity(
        node_id=node_id,
        epoch=epoch,
        model=settings.model,
        kv_namespace=prepared.namespace,
        block_bytes=layout.block_bytes,
        vocab_size=prepared.loaded.config.vocab_size,
    )
    _logger.info(
        "%s: %d blocks of %d tokens (%.2f GiB), max_model_len %d, attention %s, connector %s",
        node_id, size.num_blocks, layout.block_size, size.num_blocks * layout.block_bytes / 2**30,
        size.max_model_len, prepared.attention, connector.name,
    )  # fmt: skip
    return Node(identity, engine, connector, prefill_rate=prefill_rate)


def _engine_options(settings: NodeSettings) -> EngineOptions:
    return EngineOptions(**{field.name: getattr(settings, field.name) for field in fields(EngineOptions)})


def _connector(settings: NodeSettings, prefill_rate: PrefillRate) -> KVConnector:
    choice = choose_connectors(
        settings.connector,
        host=settings.ucx_host or settings.host,
        ucx_installed=is_ucx_installed(),
        has_secret=bool(settings.cluster_secret.get_secret_value()),
    )
    _logger.info("connector %s: %s", ",".join(choice.names), choice.reason)
    return create_tiers(choice.names, _connector_settings(settings), recompute_seconds=prefill_rate.seconds)


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
