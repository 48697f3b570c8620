"""Whether a node fits the others: whom it has to fit, and what is said of it if it does not.

What two nodes are compared in is in `agreement`, who wins where none is live in `election`. Invariant: a node that
passes agrees with every live one, and has another id.
"""

from collections.abc import Sequence

from kvrelay.core.errors import ConfigurationError
from router.nodes.agreement import difference
from router.nodes.election import elect
from router.nodes.node import NodeHandle, NodeState


class NodeRefusedError(ConfigurationError):
    """A node does not fit the others; the message says in what."""


def check_fit(node: NodeHandle, nodes: Sequence[NodeHandle], *, now: float) -> None:
    """Checks a node, as it was last described, against those of `nodes` that are live or, if there are none, against
    the elected one. Raises NodeRefusedError if it does not fit. `now` is read from the clock of their `heard_at`."""
    if node.misfit is not None:
        raise NodeRefusedError(node.misfit)
    for other in _rivals(node, nodes):
        if other.source.node_id == node.source.node_id:
            raise NodeRefusedError(f"node_id {node.source.node_id!r} is that of {other.address} already")
    live = [other for other in nodes if other is not node and other.state is NodeState.LIVE]
    for other in live:
        if found := difference(node.described, other.described):
            raise NodeRefusedError(f"{found} (as {other.name} has it, which is live)")
    if live:
        return
    elected = elect(nodes, now=now)
    if elected is None or elected.node is node:
        return
    if found := difference(node.described, elected.node.described):
        raise NodeRefusedError(f"{found} (as {elected.node.name} has it; {elected.why})")


def _rivals(node: NodeHandle, nodes: Sequence[NodeHandle]) -> list[NodeHandle]:
    """Returns the nodes that keep their id if `node` has the same one: those that are live or draining, and those that
    still connect and are listed before it."""
    before = nodes[: nodes.index(node)]
    return [
        other
        for other in nodes
        if other is not node
        and other.description is not None
        and (other.is_watched or (other.state is NodeState.CONNECTING and other in before))
    ]
