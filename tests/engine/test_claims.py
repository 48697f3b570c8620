"""Bursts of requests, of which each one takes what those before it have left. To admit them takes work that grows with
their number, not with its square."""

import pytest

from kvrelay.engine.request import KVRole
from kvrelay.engine.sequence import Sequence
from tests.engine.harness import Harness, prompt_of, request

READ = ("width", "num_missing_tokens", "num_expected_tokens", "next_position")  # by whoever visits a sequence


def _end(harness: Harness, num_requests: int) -> None:
    for number in range(num_requests):
        harness.engine.abort(str(number))
    for result in harness.results:
        for reservation in result.reservations:
            harness.engine.unpin([block.block_id for block in reservation.missing])
    harness.engine.check_idle()


@pytest.mark.parametrize("role", [KVRole.LOCAL, KVRole.CONSUME])
def test_those_admitted_in_one_step_do_not_take_each_others_places(role: KVRole) -> None:
    harness = Harness(max_num_seqs=5)
    for number in range(4):
        harness.engine.add(request(str(number), prompt_of(10, number), 4, role=role, n=2))
    harness.step()
    assert harness.engine.load().num_requests_waiting == 2
    _end(harness, 4)


@pytest.mark.parametrize("n", [1, 2])
def test_the_next_two_blocks_of_every_output_are_no_room_for_others(n: int) -> None:
    """Else a request would begin that another output soon preempts. Its first token may still be to come."""
    harness = Harness(num_blocks=20)
    harness.engine.add(request("decoding", prompt_of(9), 40, n=n))
    harness.engine.add(request("arriving", prompt_of(9, 1), 40, role=KVRole.CONSUME, n=n))
    harness.step()
    harness.step()
    assert harness.engine.load().num_free_blocks == 20 - (1 + n) - 2
    num_left = 20 - (1 + n) - 2 * n - 2 - 2 * n  # for a prompt that begins
    harness.engine.add(request("beginning", prompt_of(8 * num_left - 1, 2), 1))
    harness.step()
    assert harness.engine.load().num_requests_waiting == 0
    harness.engine.abort("beginning")
    harness.engine.add(request("waiting", prompt_of(8 * num_left + 1, 3), 1))
    harness.step()
    assert harness.engine.load().num_requests_waiting == 1
    harness.engine.abort("decoding")
    harness.step()
    assert harness.engine.load().num_requests_waiting == 0
    harness.engine.unpin([block.block_id for block in harness.reservation("arriving").missing])
    harness.engine.abort("arriving")
    harness.run()
    harness.engine.check_idle()


def test_a_later_reservation_claims_nothing_that_an_earlier_prompt_needs() -> None:
    """Which waits for a step alone. Its KV never arrives here, and it would keep its next blocks for ever."""
    harness = Harness(num_blocks=22, max_num_batched_tokens=8)
    harness.engine.add(request("under way", prompt_of(116), 50))
    harness.step()
    harness.engine.add(request("first", prompt_of(24, 1), 1))
    harness.engine.add(request("later", prompt_of(16, 2), 100, role=KVRole.CONSUME))
    while ("first", 0) not in harness.finished:
        assert harness.step()
        assert ("under way", 0) not in harness.finished
    harness.engine.abort("later")
    harness.engine.unpin([block.block_id for block in harness.reservation("later").missing])
    harness.run()
    harness.engine.check_idle()


def test_an_output_that_ends_claims_no_block() -> None:
    """The last token, which is under way, needs none."""
    harness = Harness(num_blocks=3, run_ahead=True)
    harness.engine.add(request("ending", prompt_of(8), 1))
    harness.step()
    harness.engine.add(request("arriving", prompt_of(16, 1), role=KVRole.CONSUME))
    harness.step()
    assert len(harness.reservation("arriving").missing) == 2
    harness.run()
    assert harness.finish_order == ["ending"]
    harness.engine.unpin([block.block_id for block in harness.reservation("arriving").missing])
    harness.engine.abort("arriving")
    harness.engine.check_idle()


def _num_reads(monkeypatch: pytest.MonkeyPatch, num_requests: int, role: KVRole) -> int:
    """Counts how often the first step reads what a sequence has or needs, when that many short requests come."""
    harness = Harness(num_blocks=256, max_num_seqs=128, max_num_batched_tokens=1024)
    for number in range(num_requests):
        harness.engine.add(request(str(number), prompt_of(6, number), 4, role=role))
    num_reads = 0

    def counted(getter: property) -> property:
        def read(sequence: Sequence) -> object:
            nonlocal num_reads
            num_reads += 1
            return getter.__get__(sequence)

        return property(read)

    with monkeypatch.context() as patched:
        for name in READ:
            patched.setattr(Sequence, name, counted(vars(Sequence)[name]))
        harness.step()
    assert harness.engine.load().num_requests_running == num_requests, "all in one step"
    _end(harness, num_requests)
    assert num_reads >= num_requests
    return num_reads


@pytest.mark.parametrize("role", [KVRole.LOCAL, KVRole.CONSUME])
def test_four_times_as_many_requests_take_at_most_four_times_the_work(
    monkeypatch: pytest.MonkeyPatch, role: KVRole
) -> None:
    """Else a thousand short prompts, or prompts that are cached, would stop the engine's thread for seconds, and all
    that decode would wait."""
    assert _num_reads(monkeypatch, 128, role) <= 4 * _num_reads(monkeypatch, 32, role)
