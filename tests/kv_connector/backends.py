"""One harness per backend, with which the contract suite makes nodes and damages blocks; it says what the backend
promises."""

import hashlib
import secrets
from dataclasses import replace
from typing import Protocol

import numpy as np
import redis

from kv_connector.base import FetchOutcome, FetchOutcomes, HostConnector, KVConnector, PoolBuffer
from kv_connector.device.base import DeviceConnector
from kv_connector.device.cuda_ipc import CudaIpcConnector
from kv_connector.device.pool import DevicePool
from kv_connector.device.staged import StagedConnector, staging_blocks
from kv_connector.header import HEADER_BYTES
from kv_connector.in_process import InProcessConnector, InProcessHub
from kv_connector.segments.shared_memory import SharedMemoryConnector
from kv_connector.settings import RedisSettings, SharedMemorySettings, UcxSettings
from kv_connector.stats import ConnectorStats
from kv_connector.store.redis_store import RedisConnector
from kv_connector.tiered import TieredConnector
from kv_connector.ucx.connector import UcxConnector
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from kvrelay.node.transfers.block_copy import choose_copy
from tests.kv_connector.device.direct_device import DirectDevice
from tests.kv_connector.device.slow_device import SlowDevice
from tests.kv_connector.settled import settled

LAYOUT = KVLayout(num_kv_heads=2, num_layers=4, block_size=16, head_dim=32, dtype="float32")  # 32 KiB a block
OTHER_LAYOUT = KVLayout(num_kv_heads=4, num_layers=2, block_size=16, head_dim=32, dtype="float32")  # as many bytes
OTHER_SCALES = replace(LAYOUT, scales_digest="0123456789abcdef0123456789abcdef")  # the same bytes mean other KV
CLUSTER_SECRET = "only the tests know this one"
EPOCH = 0x1234_5678_9ABC_DEF0


class Node:
    """A connector with its pool."""

    def __init__(self, connector: HostConnector, node_id: str, num_blocks: int, layout: KVLayout, epoch: int) -> None:
        self.pool: PoolBuffer = connector.allocate(layout, num_blocks, node_id=own_name(node_id), epoch=epoch)
        self.connector: KVConnector = connector
        self.source = KVSource(node_id, epoch, connector.endpoint)

    @property
    def first_stats(self) -> ConnectorStats:
        """Returns the counters of the only backend, or of the first tier."""
        return next(iter(self.connector.all_stats().values()))

    def row(self, block_id: int) -> memoryview:
        size = self.pool.layout.block_bytes
        return self.pool.memory[block_id * size : (block_id + 1) * size]

    def fill(self, block: NamedBlock) -> None:
        self.row(block.block_id)[:] = content(block.block_hash, self.pool.layout.block_bytes)


class DeviceNode(Node):
    """A node whose pool is on a device, staged in `staging_bytes` of host memory. Only the test sees `pool`."""

    def __init__(
        self,
        connector: HostConnector,
        node_id: str,
        num_blocks: int,
        layout: KVLayout,
        epoch: int,
        *,
        staging_bytes: int = 1 << 30,
    ) -> None:
        slots = staging_blocks(layout, num_blocks, staging_bytes)
        self.staging = connector.allocate(layout, slots, node_id=own_name(node_id), epoch=epoch)
        self.device = SlowDevice(num_blocks, layout.block_bytes)
        self.device.attach(self.staging)
        self.staged = StagedConnector(connector, self.staging, self.device)
        self.connector = self.staged
        self.pool = PoolBuffer(self.device.memory, layout, num_blocks)
        self.source = KVSource(node_id, epoch, connector.endpoint)

    def staged_row(self, block_id: int) -> memoryview:
        slot = self.staged._copies._copies[block_id].slot
        size = self.staging.layout.block_bytes
        return self.staging.memory[slot * size : (slot + 1) * size]


class DirectNode(Node):
    """A node whose pool is on a device that its connector reaches directly. Only the test sees `pool`."""

    def __init__(self, connector: DeviceConnector, node_id: str, num_blocks: int, layout: KVLayout, epoch: int) -> None:
        self.device = DirectDevice(num_blocks, layout.block_bytes)
        self.device_pool = DevicePool(self.device, layout)
        connector.serve(self.device_pool, node_id=own_name(node_id), epoch=epoch)
        self.connector = connector
        self.pool = PoolBuffer(self.device.memory, layout, num_blocks)
        self.source = KVSource(node_id, epoch, connector.endpoint)

    async def close(self) -> None:
        await self.connector.close()
        self.device_pool.stop()


class Harness(Protocol):
    outlives_owner: bool  # blocks stay fetchable after retract and close
    has_source: bool  # endpoint and epoch of the source matter
    has_store: bool  # blocks are there when nobody is named as the source

    def connector(self) -> HostConnector: ...

    def damage(self, owner: Node, block: NamedBlock) -> None:
        """Flips one payload byte of a published block where it is stored."""
        ...


class SharedMemoryHarness:
    outlives_owner = False
    has_source = True
    has_store = False

    def connector(self) -> HostConnector:
        return SharedMemoryConnector(SharedMemorySettings(), copy=choose_copy())

    def damage(self, owner: Node, block: NamedBlock) -> None:
        owner.row(block.block_id)[-1] ^= 1


class InProcessHarness:
    outlives_owner = False
    has_source = True
    has_store = False

    def __init__(self) -> None:
        self.hub = InProcessHub()

    def connector(self) -> HostConnector:
        return InProcessConnector(self.hub)

    def damage(self, owner: Node, block: NamedBlock) -> None:
        owner.row(block.block_id)[-1] ^= 1


class UcxHarness:
    outlives_owner = False
    has_source = True
    has_store = False

    def connector(self) -> HostConnector:
        return UcxConnector(UcxSettings(CLUSTER_SECRET))

    def damage(self, owner: Node, block: NamedBlock) -> None:
        owner.row(block.block_id)[-1] ^= 1


class RedisHarness:
    outlives_owner = True
    has_source = False
    has_store = True

    def __init__(self, url: str, prefix: str) -> None:
        self.settings = RedisSettings(url=url, key_prefix=prefix, ttl_seconds=60)

    def connector(self) -> HostConnector:
        return RedisConnector(self.settings)

    def key(self, block: NamedBlock) -> str:
        return f"{self.settings.key_prefix}:{block.block_hash.hex()}"

    def damage(self, owner: Node, block: NamedBlock) -> None:
        with redis.Redis.from_url(self.settings.url) as client:
            value = client.get(self.key(block))
            assert isinstance(value, bytes) and len(value) == HEADER_BYTES + owner.pool.layout.block_bytes
            client.set(self.key(block), value[:-1] + bytes([value[-1] ^ 1]))


class TieredHarness:
    """A backend with a store behind it. Damages blocks in every tier; `test_tiered.py` tests a healthy second one."""

    outlives_owner = False
    has_source = True
    has_store = True

    def __init__(self, first: Harness, store: RedisHarness) -> None:
        self.first = first
        self.store = store

    def connector(self) -> HostConnector:
        return TieredConnector([self.first.connector(), self.store.connector()])

    def damage(self, owner: Node, block: NamedBlock) -> None:
        self.store.damage(owner, block)
        self.first.damage(owner, block)


class DirectHarness:
    """Pools on devices that connectors reach: through each other's mapped memory, UCX, or both."""

    outlives_owner = False
    has_source = True
    has_store = False

    def __init__(self, names: str, directory: str | None = None) -> None:
        self.names = names.split(",")
        self.settings = SharedMemorySettings(directory)

    def connector(self) -> DeviceConnector:
        made: list[DeviceConnector] = []
        for name in self.names:
            made.append(UcxConnector(UcxSettings(CLUSTER_SECRET)) if name == "ucx" else CudaIpcConnector(self.settings))
        return made[0] if len(made) == 1 else TieredConnector(made)

    def damage(self, owner: Node, block: NamedBlock) -> None:
        owner.row(block.block_id)[-1] ^= 1


class DeviceHarness:
    """A pool on a device, behind the connector of another harness."""

    def __init__(self, inner: Harness) -> None:
        self.inner = inner
        self.outlives_owner = inner.outlives_owner
        self.has_source = inner.has_source
        self.has_store = inner.has_store

    def connector(self) -> HostConnector:
        return self.inner.connector()

    def damage(self, owner: Node, block: NamedBlock) -> None:
        """Damages the copy that peers are given."""
        assert isinstance(owner, DeviceNode)
        if self.has_store:
            self.inner.damage(owner, block)
        if self.has_source:
            owner.staged_row(block.block_id)[-1] ^= 1


def own_name(node_id: str) -> str:
    """Returns a name that no other node has on this machine: other tests may run beside these, and one that has failed
    may have left a node."""
    return f"{node_id}-{secrets.token_hex(4)}"


def content(name: BlockHash, size: int) -> bytes:
    """Returns the payload that belongs to a name; whatever is fetched under it must be this."""
    seed = int.from_bytes(hashlib.sha256(name).digest()[:8], "little")
    return np.random.default_rng(seed).bytes(size)


def num_leading_fetched(outcomes: FetchOutcomes) -> int:
    """Returns how many of the first blocks arrived."""
    return next((i for i, one in enumerate(outcomes) if one is not FetchOutcome.FETCHED), len(outcomes))


def blocks(count: int, *, tag: str = "", first_id: int = 0, tail: int = 16) -> list[NamedBlock]:
    """Returns named blocks with consecutive ids; the last one has `tail` tokens."""
    names = [BlockHash(hashlib.sha256(f"{tag}/{index}".encode()).digest()) for index in range(count)]
    return [NamedBlock(first_id + i, name, tail if i == count - 1 else 16) for i, name in enumerate(names)]


async def write_and_publish(node: Node, chosen: list[NamedBlock]) -> None:
    """Publishes blocks with their content; returns when every tier has them."""
    for block in chosen:
        node.fill(block)
    await node.connector.publish(chosen)
    await settled(node.connector)


def moved(chosen: list[NamedBlock], first_id: int) -> list[NamedBlock]:
    """Returns the same names at other block ids."""
    return [NamedBlock(first_id + index, block.block_hash, block.num_tokens) for index, block in enumerate(chosen)]
