"""The node's KV pool and the connector that serves it: in host memory, which the connector allocates, or on a GPU.

Invariant: the engine and the connector see the same blocks, and nothing on the host reads device memory.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from kv_connector.base import HostConnector, KVConnector
from kv_connector.device.base import DeviceConnector
from kv_connector.device.memory import DeviceMemory, DirectMemory
from kv_connector.device.pool import DevicePool
from kv_connector.device.self_test import check_device
from kv_connector.device.staged import StagedConnector, staging_blocks
from kv_connector.tiered import TieredConnector
from kvrelay.core.errors import ConfigurationError, KVError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.engine.kv_pool import allocate_pool, pool_over

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """How to make a pool. `staging_bytes`: host memory for blocks on their way, if the pool is on a GPU."""

    layout: KVLayout
    num_blocks: int
    staging_bytes: int
    node_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class NodePool:
    """A pool with its connector. `tensor`: zeroed, `[num_blocks, *layout.block_shape]`. `forgets`: peers may not find
    blocks that the pool still holds, so those that a request finds by name have to be published again."""

    tensor: Tensor
    connector: KVConnector
    forgets: bool


def make_pool(backend: HostConnector, plan: PoolPlan, device: torch.device) -> NodePool:
    """Makes a pool in host memory, or on `device` and staged through the host. `backend` is not allocated yet. Raises
    ConfigurationError when there is not enough memory, or when the device does not copy right."""
    if device.type == "cpu":
        buffer = backend.allocate(plan.layout, plan.num_blocks, node_id=plan.node_id, epoch=plan.epoch)
        return NodePool(pool_over(buffer.memory, plan.layout, plan.num_blocks), backend, backend.has_store)
    from kv_connector.device.cuda_memory import CudaMemory

    tensor = allocate_pool(plan.layout, plan.num_blocks, device)
    connector = stage(backend, plan, CudaMemory(tensor))
    return NodePool(tensor, connector, connector.forgets)


def make_direct_pool(connector: TieredConnector[DeviceConnector], plan: PoolPlan, device: torch.device) -> NodePool:
    """Makes a pool on a GPU whose memory `connector`, which serves nothing yet, reaches by itself. Raises
    ConfigurationError when there is not enough memory, or `connector` does not reach the pool."""
    from kvrelay.node.transfers.cuda_pool import direct_memory

    tensor = allocate_pool(plan.layout, plan.num_blocks, device)
    memory = direct_memory(tensor)
    memory.digests([0])  # compiles the kernel for blocks of this size before a request has to wait for it
    return NodePool(tensor, serve_directly(connector, plan, memory), forgets=False)


def serve_directly(
    connector: TieredConnector[DeviceConnector], plan: PoolPlan, memory: DirectMemory
) -> TieredConnector[DeviceConnector]:
    """Has `connector` serve the pool `memory`; returns it. Raises ConfigurationError when the pool cannot be reached,
    though the scratch pool of the self-test could."""
    try:
        connector.serve(DevicePool(memory, plan.layout), node_id=plan.node_id, epoch=plan.epoch)
    except KVError as error:
        raise ConfigurationError(
            f"the KV pool cannot be reached directly: {error}; set --kv-device-transfer staged"
        ) from error
    return connector


def stage(backend: HostConnector, plan: PoolPlan, memory: DeviceMemory) -> StagedConnector:
    """Returns a connector that serves `memory` through a staging that `backend` allocates. Raises ConfigurationError
    when there is not enough memory for that, or when blocks do not come back as they were sent to the device."""
    slots = staging_blocks(plan.layout, plan.num_blocks, plan.staging_bytes)
    try:
        staging = backend.allocate(plan.layout, slots, node_id=plan.node_id, epoch=plan.epoch)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}; with KV on a GPU, lowering --kv-staging-gib helps, too") from error
    memory.attach(staging)
    report = check_device(memory, staging)
    if report.problem:
        memory.detach()
        raise ConfigurationError(
            f"blocks do not come back from the device as they went there ({report.problem}): "
            "check the GPU and its driver; --device cpu serves without it"
        )
    _logger.info(
        "KV on the device moves through %.2f GiB of host memory, %d blocks of %d; self-test passed, %.2f GB/s",
        slots * plan.layout.block_bytes / 2**30, slots, plan.num_blocks, report.bytes_per_second / 1e9,
    )  # fmt: skip
    return StagedConnector(backend, staging, memory)
