"""A rolling restart: every node in turn is told to stop, sees its requests through, and starts again at its address."""

import logging
from collections.abc import Sequence

from tests.chaos.nodes import ChaosCluster

_logger = logging.getLogger(__name__)


async def rolling_restart(cluster: ChaosCluster, names: Sequence[str] = ()) -> dict[str, int]:
    """Exit statuses of the drained nodes by name; of all nodes, unless `names` says which. The next one is not begun
    before the router knows the last one."""
    statuses = {}
    for node in [cluster.nodes[name] for name in names or cluster.nodes]:
        statuses[node.name] = await node.terminate()
        _logger.info("%s has drained with exit code %d", node.name, statuses[node.name])
        await node.start()
        await cluster.wait_live(node.name)
    return statuses
