"""Waiting until stores have been offered what was published: connectors copy it there in the background."""

import asyncio

from kv_connector.base import KVConnector
from kv_connector.device.staged import StagedConnector
from kv_connector.store.backlog import Backlog
from kv_connector.store.redis_store import RedisConnector
from kv_connector.tiered import TieredConnector


async def settled(connector: KVConnector) -> None:
    """Returns when every store behind a connector has been offered what was published through it so far."""
    if isinstance(connector, StagedConnector):
        connector = connector._inner
    for tier in connector.tiers if isinstance(connector, TieredConnector) else (connector,):
        if isinstance(tier, RedisConnector) and (backlog := tier._require().backlog) is not None:
            await emptied(backlog)


async def emptied(backlog: Backlog) -> None:
    """Returns when the backlog's `store` has been given everything added so far."""
    if backlog._task is not None:
        await asyncio.wait([backlog._task])
