"""Which node the others have to fit, if they do not all fit together."""

from dataclasses import replace
from random import Random
from typing import Any, cast

import pytest

from kvrelay.core.clock import MonotonicClock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import NodeDescription, NodeRole
from kvrelay.core.outages import Outages
from router.nodes import election
from router.nodes.agreement import difference
from router.nodes.election import VOTE_SECONDS, elect
from router.nodes.fit import check_fit
from router.nodes.links import Links
from router.nodes.node import NodeHandle, NodeState
from router.nodes.outlier import Outlier
from tests.router.scripted_nodes import NAMESPACE

NOW = 1000.0


def node(name: str, block_size: int, *, heard_at: float | None = NOW) -> NodeHandle:
    clock = MonotonicClock()
    outlier, links = Outlier(name, clock, Random(0)), Links(clock, Random(0))
    handle = NodeHandle(name, NodeRole.DECODE, cast(Any, None), outlier, Outages(clock.now), links)
    handle.heard_at = heard_at
    handle.description = NodeDescription(
        role=NodeRole.DECODE,
        source=KVSource(name, 1, ""),
        kv_namespace=replace(NAMESPACE, block_size=block_size),
        connector="in_process",
        max_model_len=100,
        vocab_size=300,
        max_num_seqs=4,
    )
    return handle


def winner(*nodes: NodeHandle) -> str:
    elected = elect(nodes, now=NOW)
    assert elected is not None
    return elected.node.address


def test_a_node_that_restarts_keeps_its_vote() -> None:
    lost = NOW - VOTE_SECONDS
    assert winner(node("new", 8), node("old-0", 4, heard_at=lost), node("old-1", 4, heard_at=lost)) == "old-0"


def test_nodes_that_are_gone_for_good_keep_nobody_out() -> None:
    gone = NOW - VOTE_SECONDS - 1.0
    assert winner(node("old-0", 4, heard_at=gone), node("old-1", 4, heard_at=gone), node("new", 8)) == "new"


def test_without_a_voter_nobody_is_elected() -> None:
    assert elect([node("never", 4, heard_at=None)], now=NOW) is None


def test_a_node_that_can_be_none_of_this_routers_has_no_vote() -> None:
    wrong = node("wrong", 4)
    wrong.misfit = "role is decode, but it is listed among the prefill nodes"
    assert winner(wrong, node("right", 8)) == "right"
    assert elect([wrong], now=NOW) is None


def test_nodes_that_all_fit_are_compared_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node of a cluster that starts holds this election."""
    compared = 0

    def counted(found: NodeDescription, expected: NodeDescription) -> str | None:
        nonlocal compared
        compared += 1
        return difference(found, expected)

    monkeypatch.setattr(election, "difference", counted)
    assert winner(*(node(f"node-{number}", 8) for number in range(64))) == "node-0"
    assert compared <= 2 * 64


def test_a_node_that_drains_keeps_out_nobody_who_fits_the_live_ones() -> None:
    """As when the nodes of a cluster are replaced one by one: a new one is live before an old one has ended."""
    new, old, joins = node("new", 8), node("old", 4), node("joins", 8)
    new.state, old.state = NodeState.LIVE, NodeState.DRAINING
    check_fit(joins, [new, old, joins], now=NOW)


def test_of_two_halves_the_one_with_the_first_node_wins() -> None:
    halves = [node(f"node-{number}", 8 if number % 2 else 16) for number in range(6)]
    elected = elect(halves, now=NOW)
    assert elected is not None
    assert (elected.node.address, elected.why) == ("node-0", "of as many nodes, it is listed first")
