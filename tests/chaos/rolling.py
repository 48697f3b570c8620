"""A rolling restart: every node in turn is told to stop, sees its requests through, and starts again at its address."""

import logging

from tests.chaos.nodes import ChaosCluster

_logger = logging.getLogger(__name__)


async def rolling_restart(cluster: ChaosCluster) -> dict[str, int]:
    """Exit statuses of the drained nodes by name. The next one is not begun before the router knows the last one."""
    statuses = {}
    for node in cluster.nodes.values():
        statuses[node.name] = await node.terminate()
        _logger.info("%s has drained with exit code %d", node.name, statuses[node.name])
        await node.start()
        await cluster.wait_live(node.name)
    return statuses
