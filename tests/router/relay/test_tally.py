"""What a request's trace says of computed and cached tokens, from what nodes report."""

from prometheus_client import CollectorRegistry

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.node_report import NOTHING_FETCHED, FetchReport, NodeRole
from router.relay.recovery_metrics import RecoveryMetrics
from router.relay.tally import Tally
from router.request import KVOrigins, NodeRequest, RequestTrace, RoutedRequest
from tests.manual_clock import ManualClock
from tests.router.scripted_nodes import NAMESPACE

PROMPT = tuple(range(100, 110))
FETCHED = FetchReport(num_tokens=4, fetched=(("prefill-1", 1),), num_missing=2)


def make() -> tuple[Tally, ManualClock, CollectorRegistry]:
    request = RoutedRequest("r", PROMPT, SamplingParams(seed=1), NAMESPACE, timeout=60.0)
    clock, collectors = ManualClock(), CollectorRegistry()
    return Tally(request, clock, RecoveryMetrics("m", collectors)), clock, collectors


def placed(*outputs: int, is_replay: bool = False) -> NodeRequest:
    """Returns a placement with the output tokens that the client has already."""
    sampling = SamplingParams(seed=1)
    return NodeRequest((*PROMPT, *outputs), sampling, NAMESPACE, 0, b"", len(outputs), 0, is_replay=is_replay)


def trace(tally: Tally) -> RequestTrace:
    return tally.trace(prefill_node="prefill-0", decode_node="decode-0")


def test_what_the_prefilling_node_held_or_fetched_is_cached() -> None:
    for reader in NodeRole:
        tally, _, collectors = make()
        tally.computed(placed(), num_cached_tokens=4, fetches=FETCHED, reader=reader)
        found = trace(tally)
        assert (found.num_computed_tokens, found.num_cached_tokens, found.num_transferred_blocks) == (2, 8, 1)
        assert found.kv == KVOrigins(num_holder_blocks=1)
        labels = {"model_name": "m", "reader": reader.value}
        assert collectors.get_sample_value("kvrelay:kv_ladder_blocks_total", {**labels, "rung": "holder"}) == 1
        assert collectors.get_sample_value("kvrelay:kv_ladder_failures_total", {**labels, "cause": "missing"}) == 2


def test_what_a_refill_fetched_is_not_computed_again() -> None:
    tally, _, _ = make()
    tally.computed(placed(), num_cached_tokens=4, fetches=NOTHING_FETCHED)
    tally.refilled(placed(), num_cached_tokens=4, fetches=FETCHED)
    found = trace(tally)
    assert found.kv == KVOrigins(num_holder_blocks=1, num_refilled_tokens=2)
    assert (found.num_computed_tokens, found.num_transferred_blocks) == (6, 1)


def test_what_is_computed_twice_is_computed_and_what_nobody_computes_is_cached() -> None:
    """Each node computes the end of the prompt, so the longest end counts."""
    tally, _, _ = make()
    tally.computed(placed(), num_cached_tokens=8, fetches=NOTHING_FETCHED)
    tally.decode_ready(placed(), num_recomputed_tokens=1, fetches=FETCHED, rungs={})
    assert (trace(tally).num_computed_tokens, trace(tally).num_cached_tokens) == (2, 8)
    tally.decode_ready(placed(), num_recomputed_tokens=5, fetches=FETCHED, rungs={})
    assert (trace(tally).num_computed_tokens, trace(tally).num_cached_tokens) == (5, 5)
    tally.computed(placed(is_replay=True), num_cached_tokens=9, fetches=NOTHING_FETCHED)
    assert trace(tally).num_cached_tokens == 5, "the rest was found because this request had computed it"


def test_what_a_request_has_computed_before_it_lost_a_node_is_not_cached() -> None:
    """The node was lost before it could say that it had computed anything."""
    tally, _, _ = make()
    tally.placed(placed(), num_uncached_tokens=7)
    tally.placed(placed(is_replay=True), num_uncached_tokens=1)
    tally.computed(placed(is_replay=True), num_cached_tokens=9, fetches=NOTHING_FETCHED)
    found = trace(tally)
    assert (found.num_computed_tokens, found.num_cached_tokens, found.kv.num_replayed_tokens) == (7, 3, 1)


def test_what_a_replay_costs_is_no_part_of_the_prompt() -> None:
    tally, clock, _ = make()
    clock.seconds += 1.0
    tally.accepted()
    clock.seconds += 2.0
    tally.computed(placed(), num_cached_tokens=8, fetches=NOTHING_FETCHED)
    tally.first_token()
    clock.seconds += 4.0
    tally.decode_ready(placed(), num_recomputed_tokens=0, fetches=FETCHED, rungs={})
    clock.seconds += 8.0
    replay = placed(7, 8, is_replay=True)
    tally.computed(replay, num_cached_tokens=9, fetches=NOTHING_FETCHED)
    tally.refilled(replay, num_cached_tokens=7, fetches=NOTHING_FETCHED)
    tally.decode_ready(replay, num_recomputed_tokens=6, fetches=NOTHING_FETCHED, rungs={})
    found = trace(tally)
    assert (found.num_computed_tokens, found.num_cached_tokens) == (2, 8)
    assert (found.queue_seconds, found.ttft_seconds, found.handover_seconds, found.e2e_seconds) == (1.0, 3.0, 4.0, 15.0)
    kv = found.kv
    assert (kv.num_replayed_tokens, kv.num_refilled_tokens, kv.num_recomputed_tokens) == (3, 5, 6)


def test_reports_that_cannot_be_true_make_no_count_negative() -> None:
    tally, _, _ = make()
    tally.computed(placed(is_replay=True), num_cached_tokens=14, fetches=NOTHING_FETCHED)
    found = trace(tally)
    assert (found.num_computed_tokens, found.num_cached_tokens, found.kv.num_replayed_tokens) == (0, 10, 0)


def test_every_series_is_there_before_it_counts_anything() -> None:
    _, _, collectors = make()
    assert all(family.samples for family in collectors.collect())
