"""Two engines that run ahead, with blocks moving between them at random moments, give the tokens of one engine."""

import random

import pytest

from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.engine.request import KVRole
from kvrelay.engine.step_result import Reservation
from tests.engine.fake_runner import expected_output
from tests.engine.harness import Harness, first_tokens, move, prompt_of, request


class Pair:
    """A prefill and a decode engine, and what moves blocks between them, at random moments."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.prefill = Harness(num_blocks=rng.choice([24, 60]), max_num_batched_tokens=16, publish=True, run_ahead=True)
        self.decode = Harness(num_blocks=rng.choice([24, 60]), max_num_seqs=6, publish=True, run_ahead=True)
        self.prompts: dict[str, list[int]] = {}
        self.gone: set[str] = set()
        self.waiting: dict[str, Reservation] = {}
        self._num_seen = 0

    def add(self, request_id: str, prompt: list[int], n: int) -> None:
        self.prompts[request_id] = prompt
        self.prefill.engine.add(request(request_id, prompt, 8, role=KVRole.PRODUCE, n=n))
        self.decode.engine.add(request(request_id, prompt, 8, role=KVRole.CONSUME, n=n))

    def turn(self) -> bool:
        """Steps both engines and may move blocks. Returns whether anything may still happen."""
        busy = self.prefill.step() | self.decode.step()
        for result in self.decode.results[self._num_seen :]:
            self.waiting.update({reservation.request_id: reservation for reservation in result.reservations})
        self._num_seen = len(self.decode.results)
        for request_id in [name for name in self.waiting if (name, 0) in self.prefill.tokens]:
            if self.rng.random() < 0.5:
                self._move(request_id)
                busy = True  # the decode engine has something to do
        return busy or bool(self.waiting)

    def _move(self, request_id: str) -> None:
        """Moves all blocks or some of them; the decode engine computes the others."""
        reservation = self.waiting.pop(request_id)
        count = None if self.rng.random() < 0.7 else self.rng.randrange(len(reservation.missing) + 1)
        move(self.prefill, self.decode, reservation, count=count)
        self.prefill.engine.release_lease(request_id)
        self.decode.engine.start(request_id, first_tokens(self.prefill, request_id))

    def abort(self, request_id: str) -> None:
        self.gone.add(request_id)
        self.prefill.engine.abort(request_id)
        self.decode.engine.abort(request_id)
        if (reservation := self.waiting.pop(request_id, None)) is not None:
            self.decode.engine.unpin([block.block_id for block in reservation.missing])


@pytest.mark.parametrize("seed", range(12))
def test_prefill_here_and_decode_there_give_the_same_tokens(seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(rng)
    outputs = {}
    for i in range(14):
        outputs[str(i)] = n = rng.choice([1, 1, 2])
        pair.add(str(i), [*prompt_of(rng.randrange(16)), *prompt_of(rng.randrange(1, 30), i)], n)
        for _ in range(rng.randrange(4)):
            pair.turn()
        known = {name for name in pair.prompts if name in pair.waiting or name in pair.gone}
        if known and rng.random() < 0.2:
            pair.abort(rng.choice(sorted(known)))
    while pair.turn():
        pass
    for request_id in outputs.keys() - pair.gone:
        for index in range(outputs[request_id]):
            tokens = [*pair.prefill.tokens[request_id, index], *pair.decode.tokens[request_id, index]]
            assert tokens == expected_output(pair.prompts[request_id], 8, choice_index=index)
    pair.prefill.engine.check_idle()
    pair.decode.engine.check_idle()
    assert pair.decode.late.num_ahead > 10


def test_blocks_that_a_prompt_holds_for_its_later_chunks_are_no_room_for_others() -> None:
    """They were reserved for KV that has not arrived, and stay with the prompt, whose chunk needs no more. Counted as
    room, they would let a step be planned that has to preempt, while one is in flight."""
    harness = Harness(num_blocks=10, max_num_batched_tokens=16, run_ahead=True)
    decoded, reserved = prompt_of(15, 1), prompt_of(61)
    harness.engine.add(request("decode", decoded, 12))
    harness.engine.add(request("prompt", reserved, 4, role=KVRole.CONSUME))
    harness.step()
    assert harness.engine.load().num_free_blocks == 0
    harness.engine.unpin([block.block_id for block in harness.reservation("prompt").missing])
    harness.engine.start("prompt", [TokenOutput(0, tuple(expected_output(reserved, 1)))])
    harness.run()
    assert harness.engine.load().num_preemptions == 1
    assert harness.tokens["decode", 0] == expected_output(decoded, 12)
    assert harness.tokens["prompt", 0] == expected_output(reserved, 4)[1:]
    harness.engine.check_idle()
