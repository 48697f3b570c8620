"""Placements of prompts that have their beginning in common with prompts that nodes are still to compute."""

import pytest

from router.policies.placement import PlacementReason
from router.policies.prefix_aware import PrefixAware
from tests.router.candidates import candidates, decode, facts, prefill


@pytest.mark.parametrize(("sequences", "chosen"), [(14, "d1"), (16, "d0")])
def test_without_prefill_nodes_a_prompt_follows_one_with_the_same_beginning_unless_others_are_much_less_busy(
    sequences: int, chosen: str
) -> None:
    """d1 will hold 960 of its tokens, which d0 would have to compute: as much as 15 sequences cost."""
    nodes = candidates(decode("d0"), decode("d1", coming=60, sequences=sequences))
    placement = PrefixAware(64).choose(facts(), nodes)
    assert (placement.decode, placement.decode_sources) == (chosen, ())


@pytest.mark.parametrize(("queued", "chosen"), [(950, "p1"), (970, "p0")])
def test_a_prompt_queues_behind_one_with_the_same_beginning_if_that_is_faster(queued: int, chosen: str) -> None:
    nodes = candidates(prefill("p0"), prefill("p1", coming=60, queued=queued), decode("d"))
    placement = PrefixAware(0).choose(facts(), nodes)
    assert (placement.prefill, placement.sources) == (chosen, ())


def test_what_a_prefill_node_will_hold_need_not_be_fetched() -> None:
    """Fetching 960 tokens costs as much as computing 96."""
    for queued, chosen in ((90, "p1"), (100, "p0")):
        nodes = candidates(
            prefill("p0"), prefill("p1", coming=60, queued=queued), decode("d0"), decode("d1", held=60, sequences=99)
        )
        assert PrefixAware(0).choose(facts(), nodes).prefill == chosen


def test_nor_need_what_a_decode_node_will_hold() -> None:
    """Fetching 960 tokens costs as much as one and a half sequences."""
    for sequences, chosen in ((1, "d1"), (2, "d0")):
        nodes = candidates(prefill("p"), decode("d0"), decode("d1", coming=60, sequences=sequences))
        assert PrefixAware(0).choose(facts(), nodes).decode == chosen


@pytest.mark.parametrize(
    ("queued", "reason"), [(940, PlacementReason.PREFILL_BUSY), (945, PlacementReason.DISAGGREGATED)]
)
def test_a_decode_node_that_is_to_compute_the_same_beginning_computes_the_rest_if_that_is_faster(
    queued: int, reason: PlacementReason
) -> None:
    """56 tokens are missing there once its queue is done, which are few, but the idle prefill node needs 1,000."""
    nodes = candidates(prefill("p"), decode("d0", coming=59, queued=queued))
    assert PrefixAware(64).choose(facts(), nodes).reason is reason


@pytest.mark.parametrize(("queued", "chosen"), [(950, "d1"), (970, "d0")])
def test_where_prefill_nodes_have_long_queues_a_decode_node_that_computes_the_same_beginning_is_taken(
    queued: int, chosen: str
) -> None:
    """d1 computes 40 tokens once its queue is done; d0, which is idle, computes all 1,000."""
    nodes = candidates(prefill("p", queued=5000), decode("d0"), decode("d1", coming=60, queued=queued))
    placement = PrefixAware(64).choose(facts(), nodes)
    assert (placement.prefill, placement.decode) == (None, chosen)


def test_a_decode_node_that_must_not_prefill_is_not_taken_for_what_it_is_to_compute() -> None:
    nodes = candidates(prefill("p", queued=5000), decode("d0"), decode("d1", coming=60, queued=500))
    placement = PrefixAware(0).choose(facts(), nodes)
    assert (placement.prefill, placement.decode) == ("p", "d0")
