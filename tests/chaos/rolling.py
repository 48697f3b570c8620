"""A rolling restart: every node in turn is told to stop, finishes its requests, and starts again at its address."""

import logging
from collections.abc import Sequence

from tests.chaos.nodes import ChaosCluster

_logger = logging.getLogger(__name__)


async def rolling_restart(cluster: ChaosCluster, names: Sequence[str] = ()) -> dict[str, int]:
    """Restarts the nodes named, or all, and returns their exit statuses by name. The next node is not stopped before
    the router takes the last one for live."""
    statuses = {}
    for node in [cluster.nodes[name] for name in names or cluster.nodes]:
        statuses[node.name] = await node.terminate()
        _logger.info("%s has drained with exit code %d", node.name, statuses[node.name])
        assert "are cut off" not in node.running.log.read_text(), f"{node.name} has not finished what it had"
        await node.start()
        await cluster.wait_live(node.name)
    return statuses
