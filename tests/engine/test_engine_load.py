"""What an engine says of its load, and that it says so when nothing else has happened."""

from dataclasses import replace

import pytest

from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.request import KVRole
from kvrelay.engine.runner import LaunchedStep, Runner
from tests.engine.harness import Harness, prompt_of, request
from tests.manual_clock import ManualClock


def test_requests_and_tokens_are_counted_in_every_state() -> None:
    harness = Harness(num_blocks=16, max_num_batched_tokens=16, publish=True)
    harness.engine.add(request("decoding", prompt_of(8), 50))
    harness.step()
    harness.engine.add(request("receiving", prompt_of(30, 1), role=KVRole.CONSUME))
    harness.engine.add(request("computing", prompt_of(40, 2), 5))
    harness.step()
    harness.engine.add(request("reserving", prompt_of(80, 3), role=KVRole.CONSUME))
    harness.engine.add(request("waiting", prompt_of(90, 4)))
    harness.engine.add(request("behind", prompt_of(70, 5)))
    harness.step()
    load = harness.engine.load()
    assert (load.num_requests_running, load.num_requests_decoding, load.num_requests_waiting) == (3, 1, 3)
    assert load.num_queued_tokens == 40 - 2 * 15 + 90 + 70
    assert load.num_free_blocks == 16 - 2 - 4 - 4
    for request_id in ("reserving", "waiting"):
        harness.engine.abort(request_id)
    assert harness.engine.load().num_queued_tokens == 40 - 2 * 15 + 70


@pytest.mark.parametrize("starts", [True, False])
def test_a_request_whose_kv_was_to_arrive_has_one_place_and_leaves_it(starts: bool) -> None:
    """Else the engine would run fewer and fewer requests."""
    harness = Harness(max_num_seqs=1)
    harness.engine.add(request("a", prompt_of(20), 4, role=KVRole.CONSUME))
    harness.step()
    harness.engine.unpin([block.block_id for block in harness.reservation("a").missing])
    if starts:
        harness.engine.start("a", [TokenOutput(0, (5,))])
    else:
        harness.engine.abort("a")
    assert harness.engine.load().num_requests_running == starts
    harness.engine.add(request("next", prompt_of(5), 2))
    harness.run()
    assert harness.finish_order == ["a"] * starts + ["next"]
    harness.engine.check_idle()


def test_a_sequence_decodes_once_all_it_was_given_is_computed() -> None:
    """Its first tokens may come from a node that was lost."""
    harness = Harness(num_blocks=16, max_num_batched_tokens=16)
    harness.engine.add(replace(request("replayed", prompt_of(20)), prior_output_token_ids=(1, 2, 3)))
    counts = []
    for _ in range(3):
        harness.step()
        load = harness.engine.load()
        counts.append((load.num_requests_running, load.num_requests_decoding, load.num_queued_tokens))
    assert counts == [(1, 0, 7), (1, 1, 0), (1, 1, 0)]


@pytest.mark.parametrize(("role", "role_behind"), [(KVRole.LOCAL, KVRole.CONSUME), (KVRole.CONSUME, KVRole.LOCAL)])
def test_the_first_request_that_lacks_room_is_named_while_others_overtake_it(role: KVRole, role_behind: KVRole) -> None:
    """And not the first in the other queue, which waits behind it."""
    harness = Harness(num_blocks=8, publish=True, policy="priority")
    harness.engine.add(request("lease", prompt_of(40), role=KVRole.PRODUCE))
    harness.run()
    assert harness.engine.load().first_lacking == 0
    harness.engine.add(request("large", prompt_of(40, 1), role=role))
    harness.engine.add(request("behind", prompt_of(40, 9), role=role_behind))
    named = set()
    for number in range(3):
        harness.engine.add(request(f"small {number}", prompt_of(5, 2 + number), 2, priority=-1))
        harness.run()
        named.add(harness.engine.load().first_lacking)
    assert len(named) == 1 and 0 not in named
    harness.engine.abort("behind")
    harness.engine.release_lease("lease")
    harness.step()
    assert harness.engine.load().first_lacking == 0


def test_a_request_that_waits_for_the_tokens_of_a_prompt_lacks_no_room() -> None:
    """Else a prefill node would end leases early for it."""
    harness = Harness(max_num_batched_tokens=16, policy="priority")
    harness.engine.add(request("long", prompt_of(64)))
    harness.step()
    harness.engine.add(request("next", prompt_of(40, 1)))
    harness.step()
    load = harness.engine.load()
    assert (load.num_requests_waiting, load.first_lacking) == (1, 0)


def test_a_request_that_lacks_only_a_place_is_not_named() -> None:
    """Else a prefill node would end leases early for it, whose blocks are of no use to it."""
    harness = Harness(max_num_seqs=2, policy="priority")
    harness.engine.add(request("decoding", prompt_of(5), 30, n=2))
    harness.step()
    harness.engine.add(request("next", prompt_of(5, 1)))
    harness.step()
    load = harness.engine.load()
    assert (load.num_requests_decoding, load.num_requests_waiting, load.first_lacking) == (2, 1, 0)


def test_where_nobody_is_overtaken_no_request_that_lacks_room_is_named() -> None:
    """Those that run leave room in time."""
    harness = Harness(num_blocks=8, publish=True)
    harness.engine.add(request("lease", prompt_of(40), role=KVRole.PRODUCE))
    harness.engine.add(request("large", prompt_of(40, 1)))
    harness.run()
    load = harness.engine.load()
    assert (load.num_requests_waiting, load.first_lacking) == (1, 0)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_preemption_after_which_nothing_runs_is_reported(run_ahead: bool) -> None:
    """Blocks that KV is to arrive in leave none for the only sequence that runs."""
    harness = Harness(num_blocks=6, run_ahead=run_ahead)
    harness.engine.add(request("preempted", prompt_of(8), 40))
    harness.step()
    harness.step()
    harness.engine.add(request("receiving", prompt_of(16, 3), 4, role=KVRole.CONSUME))
    harness.run()
    assert harness.results[-1].load == harness.engine.load()
    assert (harness.engine.load().num_preemptions, harness.engine.load().num_free_blocks) == (1, 4)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_changes_of_the_load_alone_are_reported(run_ahead: bool) -> None:
    """The router would else believe that a node is as full as it last was."""
    harness = Harness(num_blocks=8, publish=True, run_ahead=run_ahead)
    harness.engine.add(request("a", prompt_of(40), role=KVRole.PRODUCE))
    harness.run()
    assert harness.results[-1].load.num_free_blocks == 3
    harness.engine.add(request("waiting", prompt_of(40, 1), role=KVRole.CONSUME))
    harness.run()
    assert harness.results[-1].load.num_requests_waiting == 1
    harness.engine.abort("waiting")
    harness.run()
    assert harness.results[-1].load.num_requests_waiting == 0
    harness.engine.release_lease("a")
    harness.run()
    load = harness.results[-1].load
    assert (load.num_free_blocks, load.num_leases) == (8, 0)
    harness.engine.add(request("receiving", prompt_of(40, 1), role=KVRole.CONSUME))
    harness.run()
    harness.engine.abort("receiving")
    harness.run()
    harness.engine.unpin([block.block_id for block in harness.reservation("receiving").missing])
    harness.run()
    assert harness.results[-1].load.num_free_blocks == 8
    harness.engine.check_idle()


def test_where_nothing_has_changed_nothing_is_reported() -> None:
    """Every report is a message to each router."""
    harness = Harness()
    harness.engine.add(request("receiving", prompt_of(40), role=KVRole.CONSUME))
    harness.step()
    assert harness.engine.step() == (None, False)


class SecondAStep:
    """A runner whose steps take a second each."""

    def __init__(self, inner: Runner, clock: ManualClock) -> None:
        self._inner = inner
        self._clock = clock

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        self._clock.seconds += 1.0
        return self._inner.launch(plan)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_time_in_which_two_steps_are_under_way_counts_once(run_ahead: bool) -> None:
    clock = ManualClock()
    harness = Harness(
        max_num_batched_tokens=16, run_ahead=run_ahead, wrap=lambda runner: SecondAStep(runner, clock), clock=clock
    )
    began = clock.now()
    harness.engine.add(request("a", prompt_of(64), 1))
    harness.run()
    load = harness.engine.load()
    assert (load.num_prefilled_tokens, load.prefill_seconds) == (64, clock.now() - began)
