"""Placements from given facts, without nodes, network or clock."""

import itertools
from dataclasses import replace

import pytest

from router.policies.by_load import LeastLoaded, RoundRobin
from router.policies.choice import make_policy
from router.policies.facts import Candidates, DecodeCandidate, PrefillCandidate
from router.policies.placement import MAX_SOURCES, PlacementReason, Policy, SourceHint
from router.policies.prefix_aware import PrefixAware
from tests.router.candidates import candidates, decode, facts, prefill


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "prefix_aware"])
def test_without_a_prefill_node_the_decode_node_prefills(name: str) -> None:
    policy = make_policy(name, local_prefill_max_tokens=64)
    placement = policy.choose(facts(), candidates(decode("d0")))
    assert (placement.prefill, placement.decode) == (None, "d0")
    assert placement.reason is PlacementReason.NO_PREFILL_NODE


def test_round_robin_takes_every_node_in_turn() -> None:
    nodes = candidates(prefill("p0"), prefill("p1"), decode("d0"), decode("d1"), decode("d2"))
    placements = [RoundRobin().choose(facts(number=number), nodes) for number in range(6)]
    assert [placement.prefill for placement in placements] == ["p0", "p1"] * 3
    assert [placement.decode for placement in placements] == ["d0", "d1", "d2"] * 2


def test_least_loaded_takes_the_shortest_queues() -> None:
    nodes = candidates(
        prefill("p0", queued=500), prefill("p1", queued=100), decode("d0", sequences=3), decode("d1", sequences=2)
    )
    placement = LeastLoaded().choose(facts(), nodes)
    assert (placement.prefill, placement.decode) == ("p1", "d1")


def test_of_decode_nodes_with_as_many_sequences_the_least_loaded_has_more_free_blocks() -> None:
    nodes = candidates(prefill("p"), decode("d0", free=10), decode("d1", free=11))
    assert LeastLoaded().choose(facts(), nodes).decode == "d1"


def test_of_nodes_that_cost_the_same_the_one_that_holds_more_wins() -> None:
    """160 tokens are moved for the cost of computing 16."""
    nodes = candidates(prefill("p0"), prefill("p1", held=10, queued=16), decode("d"))
    assert [PrefixAware(0).choose(facts(number=number), nodes).prefill for number in range(2)] == ["p1", "p1"]


def test_a_decode_node_needs_room_for_the_outputs_too_and_no_queue_before_them() -> None:
    full = candidates(prefill("p"), decode("d0", free=10), decode("d1", free=11))
    assert PrefixAware(0).choose(facts(160), full).decode == "d1"
    queue = candidates(prefill("p"), decode("d0", queued=100), decode("d1"))
    assert PrefixAware(0).choose(facts(160), queue).decode == "d1"


def test_a_prefix_outweighs_a_short_queue_but_not_a_long_one() -> None:
    policy = PrefixAware(0)
    short = candidates(prefill("p0"), prefill("p1", held=50, queued=10), decode("d"))
    assert policy.choose(facts(), short).prefill == "p1"
    long = candidates(prefill("p0"), prefill("p1", held=50, queued=5000), decode("d"))
    assert policy.choose(facts(), long).prefill == "p0"


def test_idle_equal_nodes_take_turns() -> None:
    policy = PrefixAware(0)
    nodes = candidates(prefill("p0"), prefill("p1"), decode("d0"), decode("d1"))
    placements = [policy.choose(facts(number=number), nodes) for number in range(4)]
    assert [placement.prefill for placement in placements] == ["p0", "p1", "p0", "p1"]
    assert [placement.decode for placement in placements] == ["d0", "d1", "d0", "d1"]


def test_the_decode_node_with_fewer_sequences_wins() -> None:
    nodes = candidates(prefill("p"), decode("d0", sequences=9), decode("d1", sequences=1))
    assert PrefixAware(0).choose(facts(), nodes).decode == "d1"


def test_the_decode_node_that_holds_the_prompt_wins_among_equally_busy_ones() -> None:
    nodes = candidates(prefill("p"), decode("d0"), decode("d1", held=40))
    assert PrefixAware(0).choose(facts(), nodes).decode == "d1"


def test_a_decode_node_without_room_is_avoided() -> None:
    nodes = candidates(prefill("p"), decode("d0", free=10), decode("d1", sequences=30))
    assert PrefixAware(0).choose(facts(), nodes).decode == "d1"


def test_a_decode_node_without_a_place_is_avoided_though_it_holds_the_prompt() -> None:
    for places, expected in ((3, "d0"), (2, "d1")):
        nodes = candidates(prefill("p"), decode("d0", held=250, sequences=2, places=places), decode("d1"))
        assert PrefixAware(0).choose(facts(4000), nodes).decode == expected


@pytest.mark.parametrize(("num_streams", "most"), [(8, 8), (48, 13), (104, 13), (128, 16)])
def test_streams_that_share_a_long_prefix_spread_over_the_decode_nodes(num_streams: int, most: int) -> None:
    """The first node has it already, and 800 is the price of moving it, that of 12.5 more streams. Moved once, it is
    there for the next one, too."""
    nodes = [decode(f"d{number}", held=500 * (number == 0)) for number in range(8)]
    for number in range(num_streams):
        chosen = PrefixAware().choose(facts(8040, number=number), candidates(prefill("p", held=500), *nodes))
        index = int(chosen.decode[1:])
        nodes[index] = decode(f"d{index}", held=500, sequences=nodes[index].num_sequences + 1)
    assert max(node.num_sequences for node in nodes) <= most


@pytest.mark.parametrize(
    ("num_prompt_tokens", "held", "local"),
    [(64, 0, True), (65, 0, False), (1000, 59, True), (1000, 58, False), (1, 0, True), (992, 62, True)],
)
def test_a_short_uncached_suffix_is_computed_where_it_is_decoded(
    num_prompt_tokens: int, held: int, local: bool
) -> None:
    nodes = candidates(prefill("p", held=held), decode("d", held=held))
    placement = PrefixAware(64).choose(facts(num_prompt_tokens), nodes)
    assert (placement.prefill is None) is local
    assert placement.reason is (PlacementReason.SHORT_SUFFIX if local else PlacementReason.DISAGGREGATED)


def test_with_local_prefill_off_even_one_token_goes_to_a_prefill_node() -> None:
    nodes = candidates(prefill("p"), decode("d", held=63))
    placement = PrefixAware(0).choose(facts(1000), nodes)
    assert placement.prefill == "p"


def test_without_prefill_nodes_the_decode_node_that_holds_the_prompt_wins_though_it_is_busier() -> None:
    nodes = candidates(decode("d0"), decode("d1", held=60, sequences=1))
    placement = PrefixAware(64).choose(facts(), nodes)
    assert (placement.decode, placement.decode_sources) == ("d1", ())


def test_without_prefill_nodes_a_decode_node_fetches_what_a_much_busier_one_holds() -> None:
    nodes = candidates(decode("d0"), decode("d1", held=60, sequences=2))
    placement = PrefixAware(64).choose(facts(), nodes)
    assert (placement.decode, placement.decode_sources) == ("d0", (SourceHint("d1", 60),))


def test_a_decode_node_that_misses_little_asks_nobody() -> None:
    nodes = candidates(prefill("p0", held=62), decode("d0", held=60))
    placement = PrefixAware(64).choose(facts(), nodes)
    assert (placement.reason, placement.decode_sources) == (PlacementReason.SHORT_SUFFIX, ())


def test_sources_hold_more_than_the_chosen_node_best_first() -> None:
    nodes = candidates(
        prefill("p0", held=10), prefill("p1", held=30, queued=100_000), decode("d0", held=63), decode("d1", held=10)
    )
    placement = PrefixAware(0).choose(facts(1000), nodes)
    assert placement.prefill == "p0"
    # 1000 tokens are 62 full blocks and a partial one, which is computed in any case.
    assert placement.sources == (SourceHint("d0", 62), SourceHint("p1", 30))


def test_the_partial_tail_of_another_is_no_reason_to_fetch() -> None:
    nodes = candidates(prefill("p0", held=62), decode("d0", held=63))
    assert PrefixAware(0).choose(facts(1000), nodes).sources == ()


def test_no_more_than_the_best_few_sources_are_named() -> None:
    holders = [prefill(f"p{number}", held=number, queued=10**6) for number in range(1, MAX_SOURCES + 3)]
    placement = PrefixAware(0).choose(facts(), candidates(prefill("p0"), *holders, decode("d")))
    assert [hint.num_blocks for hint in placement.sources] == [6, 5, 4, 3]
    assert placement.sources == placement.decode_sources


def test_a_placement_is_a_pure_choice_among_the_candidates() -> None:
    policies: list[Policy] = [RoundRobin(), LeastLoaded(), PrefixAware(0), PrefixAware(64)]
    prefills = [prefill("p0", held=3, queued=9), prefill("p1"), prefill("p2", held=70)]
    decodes = [decode("d0", free=0), decode("d1", held=5, sequences=3)]
    for policy, length, number in itertools.product(policies, (1, 16, 17, 1000, 5000), range(3)):
        for num_prefill in range(4):
            nodes = candidates(*prefills[:num_prefill], *decodes)
            request = facts(length, number=number)
            placement = policy.choose(request, nodes)
            assert placement == policy.choose(request, nodes)
            assert placement.decode in {"d0", "d1"}
            assert placement.prefill in {None, *(node.node_id for node in nodes.prefill)}
            assert placement.prefill not in {source.node_id for source in placement.sources}


@pytest.mark.parametrize(
    ("p", "d", "expected"),
    [
        (prefill("p0"), decode("d0"), PlacementReason.DISAGGREGATED),  # a tie: nothing is gained
        (prefill("p0", queued=500), decode("d0"), PlacementReason.PREFILL_BUSY),
        (prefill("p0", queued=500), decode("d0", queued=500), PlacementReason.DISAGGREGATED),
        (prefill("p0", queued=500), decode("d0", decoding=1), PlacementReason.DISAGGREGATED),
        (prefill("p0", queued=9000), decode("d0", decoding=8), PlacementReason.PREFILL_BUSY),
        (prefill("p0", queued=7000), decode("d0", decoding=8), PlacementReason.DISAGGREGATED),
    ],
)
def test_a_decode_node_helps_a_busy_prefill_node_unless_that_delays_its_decodes_more(
    p: PrefillCandidate, d: DecodeCandidate, expected: PlacementReason
) -> None:
    assert PrefixAware().choose(facts(1000), candidates(p, d)).reason is expected
    placement = PrefixAware(local_prefill_max_tokens=0).choose(facts(1000), candidates(p, d))
    assert placement.reason is PlacementReason.DISAGGREGATED, "switched off"


@pytest.mark.parametrize(
    ("p", "d", "expected"),
    [
        (prefill("p0"), decode("d0", decoding=8), PlacementReason.SHARED_CORES),
        (prefill("p0"), decode("d0"), PlacementReason.DISAGGREGATED),  # which then computes with all cores, too
        (prefill("p0"), decode("d0", decoding=8, queued=333), PlacementReason.SHARED_CORES),
        (prefill("p0"), decode("d0", decoding=8, queued=334), PlacementReason.DISAGGREGATED),
        (prefill("p0", queued=499), decode("d0", decoding=8), PlacementReason.DISAGGREGATED),
        (prefill("p0", queued=500), decode("d0", decoding=8), PlacementReason.SHARED_CORES),
        (prefill("p0", queued=500), decode("d0", decoding=8, queued=1), PlacementReason.DISAGGREGATED),
        (prefill("p0", queued=1250), decode("d0", decoding=8, queued=500), PlacementReason.SHARED_CORES),
        (prefill("p0", queued=500), decode("d0"), PlacementReason.PREFILL_BUSY),
    ],
)
def test_a_prompt_takes_no_cores_away_that_a_decode_node_was_lent(
    p: PrefillCandidate, d: DecodeCandidate, expected: PlacementReason
) -> None:
    shared = candidates(replace(p, core_table="t"), replace(d, core_table="t"))
    assert PrefixAware().choose(facts(1000), shared).reason is expected
    for tables in (("", ""), ("t", "u"), ("t", ""), ("", "t")):
        apart = candidates(replace(p, core_table=tables[0]), replace(d, core_table=tables[1]))
        assert PrefixAware().choose(facts(1000), apart).reason is not PlacementReason.SHARED_CORES
    placement = PrefixAware(local_prefill_max_tokens=0).choose(facts(1000), shared)
    assert placement.reason is PlacementReason.DISAGGREGATED, "switched off"


def test_a_prefill_node_of_another_machine_costs_a_decode_node_no_cores() -> None:
    here, elsewhere = replace(prefill("p0", queued=9), core_table="t"), prefill("p1")
    nodes = candidates(here, elsewhere, replace(decode("d0", decoding=8), core_table="t"))
    assert PrefixAware().choose(facts(1000), nodes).prefill == "p1"


def test_a_prefill_node_has_little_to_do_if_another_decode_node_holds_the_prompt() -> None:
    """It has one block less to fetch than d0 has."""
    for queued, expected in ((0, "p0"), (1, "p0"), (2, None)):
        nodes = candidates(prefill("p0", held=1, queued=queued), decode("d0"), decode("d1", held=62, sequences=100))
        placement = PrefixAware().choose(facts(1000), nodes)
        assert (placement.prefill, placement.decode) == (expected, "d0")


@pytest.mark.parametrize("holder", ["decode", "prefill"])
def test_what_another_decode_node_holds_is_moved_once(holder: str) -> None:
    """Where the prefill node would have to fetch it first, the decode node does, and computes the few other tokens."""
    nodes = candidates(
        prefill("p0", held=62 * (holder == "prefill")), decode("d0"), decode("d1", held=62, sequences=100)
    )
    placement = PrefixAware().choose(facts(1000), nodes)
    if holder == "prefill":
        assert (placement.prefill, placement.reason) == ("p0", PlacementReason.DISAGGREGATED)
    else:
        assert (placement.prefill, placement.reason) == (None, PlacementReason.SHORT_SUFFIX)
        assert (placement.decode, placement.decode_sources) == ("d0", (SourceHint("d1", 62),))


def test_what_does_not_get_to_the_decode_node_it_misses() -> None:
    nodes = candidates(prefill("p0"), decode("d0"), decode("d1", held=62, sequences=100))
    placement = PrefixAware().choose(facts(1000), without(nodes, ("d1", "d0")))
    assert (placement.prefill, placement.sources, placement.decode_sources) == ("p0", (SourceHint("d1", 62),), ())


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "prefix_aware"])
def test_other_holders_are_told_to_the_decode_node_too(name: str) -> None:
    """All holders are named, except the prefill node, which announces its blocks itself, and nodes that hold no more
    than the decode node."""
    nodes = candidates(prefill("p0", held=9), prefill("p1", held=9, queued=5000), decode("d0", held=3))
    nodes = replace(nodes, decode=(*nodes.decode, decode("d1", held=7, sequences=99)))
    placement = make_policy(name, local_prefill_max_tokens=0).choose(facts(), nodes)
    assert (placement.prefill, placement.decode) == ("p0", "d0")
    assert placement.decode_sources == (SourceHint("p1", 9), SourceHint("d1", 7))


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "prefix_aware"])
def test_a_refill_goes_to_a_prefill_node_or_nowhere(name: str) -> None:
    policy = make_policy(name, local_prefill_max_tokens=64)
    nodes = candidates(prefill("p0", queued=10), prefill("p1", queued=900), decode("d0", held=5))
    refill = policy.refill(facts(), nodes, 500)
    assert refill is not None and refill.prefill == "p0"
    assert refill.sources == (SourceHint("d0", 5),)
    assert policy.refill(facts(), candidates(decode("d0")), 500) is None


def test_refills_take_turns_or_the_shortest_queue() -> None:
    nodes = candidates(prefill("p0", queued=900), prefill("p1", queued=10), prefill("p2", queued=500), decode("d0"))
    for policy, expected in (
        (RoundRobin(), ["p0", "p1", "p2", "p0"]),
        (LeastLoaded(), ["p1"] * 4),
        (PrefixAware(0), ["p1"] * 4),
    ):
        refills = [policy.refill(facts(number=number), nodes, 500) for number in range(4)]
        assert [refill.prefill for refill in refills if refill is not None] == expected


def test_few_missing_tokens_are_computed_where_they_are_missed() -> None:
    nodes = candidates(prefill("p0"), decode("d0"))
    assert PrefixAware(64).refill(facts(), nodes, 64) is None
    assert PrefixAware(64).refill(facts(), nodes, 65) is not None


def without(nodes: Candidates, *broken: tuple[str, str]) -> Candidates:
    return replace(nodes, broken=frozenset(broken))


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "prefix_aware"])
def test_no_prefill_node_is_chosen_whose_kv_does_not_get_to_the_decode_node(name: str) -> None:
    policy = make_policy(name, local_prefill_max_tokens=0)
    nodes = candidates(prefill("p0"), prefill("p1"), decode("d0"), decode("d1"))
    pairs = set()
    for number, busy in itertools.product(range(4), ("d0", "d1")):
        chosen = policy.choose(
            facts(number=number),
            replace(
                without(nodes, ("p0", "d0"), ("p1", "d1")),
                decode=tuple(replace(node, num_sequences=int(node.node_id == busy)) for node in nodes.decode),
            ),
        )
        pairs.add((chosen.prefill, chosen.decode))
    assert pairs == {("p1", "d0"), ("p0", "d1")}, "the decode nodes are chosen as before"


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "prefix_aware"])
def test_a_decode_node_that_no_kv_reaches_prefills_and_asks_who_reaches_it(name: str) -> None:
    policy = make_policy(name, local_prefill_max_tokens=0)
    nodes = candidates(prefill("p0", held=9), prefill("p1", held=8), decode("d0"), decode("d1", held=7, sequences=999))
    placement = policy.choose(facts(), without(nodes, ("p0", "d0"), ("p1", "d0")))
    assert (placement.prefill, placement.decode) == (None, "d0")
    assert placement.reason is PlacementReason.NO_PREFILL_NODE
    assert placement.decode_sources == (SourceHint("d1", 7),)


def test_a_holder_whose_kv_does_not_get_to_the_decode_node_is_named_to_the_prefill_node_alone() -> None:
    nodes = candidates(prefill("p0", held=9, queued=9999), prefill("p1"), decode("d"))
    placement = PrefixAware(0).choose(facts(), without(nodes, ("p0", "d")))
    assert (placement.prefill, placement.sources, placement.decode_sources) == ("p1", (SourceHint("p0", 9),), ())


@pytest.mark.parametrize(
    ("nodes", "chosen"),
    [
        # The idle prefill node is compared with d0, not the busy one.
        (candidates(prefill("p0"), prefill("p1", queued=5000), decode("d0", sequences=1, decoding=1)), ("p0", "d0")),
        # No KV gets to d0: its own prefill would delay what it decodes.
        (
            without(
                candidates(prefill("p"), decode("d0", sequences=3, decoding=3), decode("d1", sequences=3, decoding=3)),
                ("p", "d0"),
            ),
            ("p", "d1"),
        ),
        # A prefill delays what d0 decodes; at d1 nothing decodes yet.
        (candidates(decode("d0", sequences=2, decoding=2), decode("d1", sequences=4)), (None, "d1")),
        # d0 is to compute the same beginning, but after a long queue; for d1, which is busy, the prefill node computes.
        (
            candidates(
                prefill("p"),
                decode("d0", coming=60, queued=3000, sequences=1),
                decode("d1", sequences=10, decoding=10),
            ),
            ("p", "d1"),
        ),
        # d1 could prefill sooner, but if that counted, conversations would leave their nodes.
        (
            candidates(prefill("p", queued=5000), decode("d0", sequences=3, decoding=3), decode("d1", sequences=4)),
            (None, "d0"),
        ),
        # d1 has no room for what it is to compute, which it does not hold yet.
        (candidates(prefill("p"), decode("d0", sequences=1), decode("d1", coming=60, free=10)), ("p", "d0")),
    ],
)
def test_the_cheapest_nodes_are_taken_whosever_turn_it_is(nodes: Candidates, chosen: tuple[str | None, str]) -> None:
    placements = [PrefixAware().choose(facts(number=number), nodes) for number in range(2)]
    assert [(placement.prefill, placement.decode) for placement in placements] == [chosen] * 2
