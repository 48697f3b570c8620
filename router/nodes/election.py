"""Which node the others have to fit, if not all of them fit together and none is live yet.

The result depends neither on chance nor on who answers first: the node that fits the most others wins; among equals
decode nodes come before prefill nodes, and then the one listed first. A lost node keeps its vote for a while, so that
no other node takes over a cluster that restarts. It does not keep it for ever, so that nodes that are gone for good
keep no other out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.core.node_report import NodeRole
from router.nodes.agreement import difference
from router.nodes.node import NodeHandle

VOTE_SECONDS = 120.0  # since a node was last heard of; a large model takes that long to load


@dataclass(frozen=True, slots=True)
class Elected:
    """The node that the others have to fit. `why` completes a sentence that names it."""

    node: NodeHandle
    why: str


def elect(nodes: Sequence[NodeHandle], *, now: float) -> Elected | None:
    """Returns the winner among the nodes that were heard of lately and can be this router's; None if there is no such
    node. `now` is read from the clock of their `heard_at`."""
    voters = [node for node in nodes if _votes(node, now)]
    voters.sort(key=lambda node: node.role is not NodeRole.DECODE)  # stable: otherwise as listed
    if not voters:
        return None
    votes: list[int] = []
    for node in voters:
        votes.append(sum(_fit(other, node) for other in voters))
        if votes[-1] == len(voters):
            break  # nobody has more votes, and among equals it is the first
    most = max(votes)
    winner = voters[votes.index(most)]
    rivals = any(count == most and not _fit(node, winner) for node, count in zip(voters, votes, strict=False))
    why = "of as many nodes, it is listed first" if rivals else f"it fits {most} of {len(voters)} nodes"
    return Elected(winner, why)


def _votes(node: NodeHandle, now: float) -> bool:
    if node.description is None or node.misfit is not None:
        return False
    return node.heard_at is not None and now - node.heard_at <= VOTE_SECONDS


def _fit(one: NodeHandle, other: NodeHandle) -> bool:
    return difference(one.described, other.described) is None
