"""Who gets blocks when there are too few for requests whose KV moves between engines."""

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import chain

import pytest

from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.block_shortage import find_shortage
from kvrelay.engine.request import KVRole
from kvrelay.engine.sequence import Sequence
from tests.engine.fake_runner import expected_output
from tests.engine.harness import BLOCK_SIZE, NAMESPACE, Harness, first_tokens, move, produce, prompt_of, request


def test_a_preempted_prefill_gives_up_what_its_lease_keeps() -> None:
    """Otherwise the request and one that goes before it would wait for each other's blocks for ever."""
    other = Harness(publish=True)
    harness = Harness(num_blocks=12, publish=True, max_num_batched_tokens=4, policy="priority")
    first, second = prompt_of(64), prompt_of(64, 1)
    produce(other, "x", second)
    harness.engine.add(request("decoding", prompt_of(14, 2), 34))
    harness.step()
    harness.engine.add(request("first", first, role=KVRole.PRODUCE))
    while harness.engine.load().num_preemptions == 0:
        assert harness.step()
    harness.engine.add(replace(request("second", second, role=KVRole.PRODUCE, priority=-1), receive=True))
    harness.run()
    move(other, harness, harness.reservation("second"))
    harness.engine.start("second")
    harness.run()
    assert harness.tokens["second", 0] == expected_output(second, 1)
    harness.engine.release_lease("second")
    harness.run()
    assert harness.tokens["first", 0] == expected_output(first, 1)
    told = [count for result in harness.results for request_id, count in result.progress if request_id == "first"]
    assert told == sorted(set(told)) and told[-1] == 8
    harness.engine.release_lease("first")
    harness.engine.check_idle()


def test_a_prompt_for_which_leases_leave_too_few_blocks_does_not_begin() -> None:
    """Else it would be preempted and begin again until a lease ends, and the node would never seem to stall."""
    harness = Harness(num_blocks=12, publish=True, max_num_batched_tokens=16)
    produce(harness, "leased", prompt_of(56))
    num_steps = harness.engine.load().num_steps
    harness.engine.add(request("b", prompt_of(64, 1), role=KVRole.PRODUCE))
    harness.run()
    load = harness.engine.load()
    assert (load.num_requests_waiting, load.num_preemptions, load.num_steps) == (1, 0, num_steps)
    harness.engine.release_lease("leased")
    harness.run()
    assert harness.tokens["b", 0] == expected_output(prompt_of(64, 1), 1)
    harness.engine.release_lease("b")
    harness.engine.check_idle()


def test_a_prompt_that_waits_for_a_step_alone_keeps_its_room() -> None:
    """Else requests whose KV arrives, which reserve before steps are planned, could overtake it for ever."""
    harness = Harness(num_blocks=75, publish=True, max_num_batched_tokens=64)
    produce(harness, "leased", prompt_of(136))
    harness.engine.add(replace(request("under way", prompt_of(300, 1), 1), receive=True))
    harness.step()
    harness.engine.add(request("first", prompt_of(200, 2), 1))
    harness.step()
    assert harness.engine.load().num_requests_waiting == 1, "it lacks blocks"
    harness.engine.start("under way")
    harness.engine.release_lease("leased")
    harness.step()
    harness.engine.add(replace(request("second", prompt_of(160, 3), 1), receive=True))
    while ("first", 0) not in harness.finished:
        assert "second" not in [found.request_id for result in harness.results for found in result.reservations]
        harness.step()
    harness.run()
    assert harness.reservation("second").request_id == "second"
    harness.engine.abort("second")
    harness.run()


def test_a_prompt_that_waits_for_a_step_alone_keeps_its_places() -> None:
    """As it keeps its blocks: it needs one place for each of its outputs."""
    harness = Harness(num_blocks=100, max_num_seqs=3, max_num_batched_tokens=64)
    harness.engine.add(request("under way", prompt_of(300), 1))
    harness.step()
    harness.engine.add(request("first", prompt_of(200, 1), 1, n=2))
    harness.engine.add(replace(request("second", prompt_of(160, 2), 1), receive=True))
    while harness.engine.load().num_requests_waiting == 2:
        assert harness.step()
    assert not [found for result in harness.results for found in result.reservations], "it is the first that has left"
    harness.run()
    harness.engine.unpin([block.block_id for block in harness.reservation("second").missing])
    harness.engine.abort("second")
    harness.engine.check_idle()


def test_a_prompt_that_lacks_blocks_is_not_overtaken_while_one_before_it_waits_for_a_step_alone() -> None:
    """Else the requests whose KV arrives would take the blocks that it lacks, for as long as prompts go before it."""
    harness = Harness(num_blocks=16, max_num_batched_tokens=16, policy="priority")
    harness.engine.add(request("arriving", prompt_of(64), role=KVRole.CONSUME))
    harness.step()
    harness.engine.add(request("lacking", prompt_of(80, 1), 1, priority=1))
    harness.step()
    harness.engine.add(request("under way", prompt_of(48, 2), 1))
    harness.step()
    harness.engine.add(request("head", prompt_of(16, 3), 1))
    harness.engine.add(request("behind", prompt_of(8, 4), role=KVRole.CONSUME, priority=1))
    harness.step()
    harness.run()
    assert harness.finish_order == ["under way", "head"]
    assert [found.request_id for result in harness.results for found in result.reservations] == ["arriving"]
    harness.engine.unpin([block.block_id for block in harness.reservation("arriving").missing])
    harness.engine.abort("arriving")
    harness.run()
    assert harness.finish_order[-1] == "lacking"
    harness.engine.unpin([block.block_id for block in harness.reservation("behind").missing])
    harness.engine.abort("behind")
    harness.engine.check_idle()


def test_a_prompt_takes_no_block_that_one_under_way_still_needs() -> None:
    """Else many short ones, whose leases outlive them, would have the long one preempted that shares its steps."""
    harness = Harness(num_blocks=24, publish=True, max_num_batched_tokens=32)
    harness.engine.add(request("long", prompt_of(160), role=KVRole.PRODUCE))
    for number in range(4):
        harness.engine.add(request(f"short {number}", prompt_of(16, 1 + number), role=KVRole.PRODUCE))
    harness.run()
    computed = [prompt.request_id for result in harness.results for prompt in result.prompts]
    assert computed == ["short 0", "short 1", "long"] and harness.engine.load().num_preemptions == 0
    for lease in ("long", "short 0", "short 1"):
        harness.engine.release_lease(lease)
    harness.run()
    for number in range(2, 4):
        harness.engine.release_lease(f"short {number}")
    harness.engine.check_idle()


def test_a_prompt_that_lacks_blocks_gets_them_before_requests_that_come_after_it() -> None:
    """Else requests whose KV arrives, which reserve their blocks first, could overtake it for ever."""
    prefill, decode = Harness(publish=True), Harness(num_blocks=16, max_num_batched_tokens=16)

    def consume(request_id: str, length: int) -> None:
        prompt = prompt_of(length, length)
        produce(prefill, request_id, prompt)
        decode.engine.add(request(request_id, prompt, 8, role=KVRole.CONSUME))

    def serve(request_id: str) -> None:
        move(prefill, decode, decode.reservation(request_id))
        decode.engine.start(request_id, first_tokens(prefill, request_id))

    consume("before", 80)
    decode.step()
    serve("before")
    decode.engine.add(request("long", prompt_of(48), 4))
    decode.step()
    consume("after", 8)
    decode.step()
    assert [one.request_id for result in decode.results for one in result.reservations] == ["before"]
    decode.run()
    assert decode.finish_order == ["before", "long"]
    serve("after")
    decode.run()
    assert decode.finish_order == ["before", "long", "after"]
    assert decode.engine.load().num_preemptions == 0
    decode.engine.check_idle()


@pytest.mark.parametrize("n", [1, 4], ids=["blocks", "sequences"])
@pytest.mark.parametrize("roles", [(KVRole.CONSUME, KVRole.LOCAL), (KVRole.LOCAL, KVRole.CONSUME)])
def test_a_request_gets_the_room_that_it_lacks_before_one_that_came_later(roles: tuple[KVRole, KVRole], n: int) -> None:
    """Else those whose KV arrives could overtake those that are computed here for ever, or the other way round."""
    harness = Harness(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=128)
    harness.engine.add(request("before", prompt_of(40), 8))
    harness.step()
    harness.engine.add(request("first", prompt_of(8 if n > 1 else 100, 1), 4, role=roles[0], n=n))
    harness.step()
    harness.engine.add(request("second", prompt_of(8, 2), 4, role=roles[1]))
    harness.step()
    load = harness.engine.load()
    assert (load.num_requests_running, load.num_requests_waiting) == (1, 2)
    harness.run()
    began: list[str] = []
    for result in harness.results:
        began += [reservation.request_id for reservation in result.reservations]
        began += [prompt.request_id for prompt in result.prompts]
    assert began[:2] == ["before", "first"]
    for request_id in ("first", "second"):
        harness.engine.abort(request_id)
    for result in harness.results:
        for reservation in result.reservations:
            harness.engine.unpin([block.block_id for block in reservation.missing])
    harness.engine.check_idle()


def test_a_request_whose_kv_arrives_takes_no_block_that_a_prompt_under_way_needs() -> None:
    """Else the prompt would be preempted before its last chunk and begin again."""
    prefill, decode = Harness(publish=True), Harness(num_blocks=12, max_num_batched_tokens=16)
    decode.engine.add(request("long", prompt_of(64), 4))
    decode.step()
    arriving = prompt_of(40, 1)
    produce(prefill, "arriving", arriving)
    decode.engine.add(request("arriving", arriving, 8, role=KVRole.CONSUME))
    decode.run()
    assert decode.finish_order == ["long"]
    move(prefill, decode, decode.reservation("arriving"))
    decode.engine.start("arriving", first_tokens(prefill, "arriving"))
    decode.run()
    assert decode.finish_order == ["long", "arriving"]
    assert decode.engine.load().num_preemptions == 0
    decode.engine.check_idle()


def test_the_blocks_of_a_preempted_request_go_to_a_more_urgent_one_though_nothing_else_happens() -> None:
    decode = Harness(num_blocks=6, policy="priority")
    decode.engine.add(request("receiving", prompt_of(24), role=KVRole.CONSUME, priority=0))
    decode.engine.add(request("running", prompt_of(15, 1), max_tokens=12, priority=2))
    decode.step()
    decode.engine.add(request("urgent", prompt_of(9, 2), role=KVRole.CONSUME, priority=1))
    decode.run()
    assert len(decode.reservation("urgent").missing) == 2
    for request_id in ("urgent", "receiving"):
        decode.engine.unpin([block.block_id for block in decode.reservation(request_id).missing])
        decode.engine.abort(request_id)
    decode.run()
    assert len(decode.tokens["running", 0]) == 12
    decode.engine.check_idle()


def test_a_request_that_waits_for_blocks_holds_none_of_those_it_has_found() -> None:
    harness = Harness(num_blocks=12)
    harness.engine.add(request("before", prompt_of(20), 50))
    for _ in range(8):
        harness.step()
    harness.engine.add(request("found", [*prompt_of(20), *prompt_of(64, 1)], role=KVRole.CONSUME))
    for _ in range(3):
        harness.step()
    assert harness.engine.load().num_requests_waiting == 1
    harness.engine.abort("found")
    harness.engine.abort("before")
    harness.engine.check_idle()


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records how many names each lookup of a pool is for."""
    counts: list[int] = []
    lookup = BlockPool.lookup

    def counted(pool: BlockPool, names: SequenceOf[BlockHash]) -> list[int]:
        counts.append(len(names))
        return lookup(pool, names)

    monkeypatch.setattr(BlockPool, "lookup", counted)
    return counts


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_prompt_that_lacks_blocks_is_not_looked_up_again_until_blocks_are_given_back(
    looked_up: list[int], is_cached: bool
) -> None:
    """A lookup takes long for a long prompt, and those that decode beside it would wait for it at each step."""
    harness = Harness(num_blocks=24)
    long = prompt_of(128)
    harness.engine.add(request("before", long if is_cached else prompt_of(128, 2), 1))
    harness.run()
    harness.engine.add(request("decoding", prompt_of(64, 1), 40))
    harness.step()
    harness.engine.add(request("long", long, 8))
    looked_up.clear()
    while ("decoding", 0) not in harness.finished:
        harness.step()
    assert looked_up == [15], "once when it came, in 40 steps"
    harness.run()
    assert looked_up == [15] * 4, "twice more to see that it fits, and once to take them"
    assert harness.tokens["long", 0] == expected_output(long, 8)


def test_of_two_requests_that_lack_blocks_only_the_first_is_looked_up_again(looked_up: list[int]) -> None:
    """Else the two would be looked up in turn at each step: what is known of one is lost with the next lookup."""
    harness = Harness(num_blocks=24, policy="priority")
    harness.engine.add(request("decoding", prompt_of(64), 40))
    harness.step()
    looked_up.clear()
    harness.engine.add(request("second", prompt_of(128, 1)))
    harness.step()
    harness.engine.add(request("first", prompt_of(128, 2), role=KVRole.CONSUME, priority=-1))
    while ("decoding", 0) not in harness.finished:
        harness.step()
    assert looked_up == [15, 16]
    harness.run()
    harness.engine.unpin([block.block_id for block in harness.reservation("first").missing])
    harness.engine.abort("first")
    harness.run()
    assert harness.finish_order == ["decoding", "second"]
    harness.engine.check_idle()


def test_a_request_that_fits_does_not_wait_for_what_an_aborted_one_before_it_lacked() -> None:
    harness = Harness(num_blocks=8, publish=True)
    produce(harness, "leased", prompt_of(40))
    harness.engine.add(request("large", prompt_of(60, 1)))
    harness.run()
    assert harness.engine.load().num_requests_waiting == 1
    harness.engine.abort("large")
    harness.engine.add(request("small", prompt_of(8, 2), 2))
    harness.run()
    assert harness.finish_order == ["small"]
    harness.engine.release_lease("leased")
    harness.engine.check_idle()


class _History:
    """Random holders of blocks, some of which have the names of the blocks of `sequence`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(16, retract=lambda block_ids: None)
        self.sequence = Sequence(
            request("a", prompt_of(self.rng.randrange(40, 120), seed)),
            index=0,
            root=NAMESPACE.root(cache_salt=b""),
            block_size=BLOCK_SIZE,
            max_model_len=1024,
            arrival=1,
            priority=0,
        )
        self.names = self.sequence.block_hashes(self.sequence.num_cacheable_blocks)
        self.held: list[list[int]] = []
        self.pinned: list[list[int]] = []

    def move(self) -> None:
        takes = (self.allocate, self.hit, self.pin, self.register)
        gives = (self.release, self.release, self.unpin, self.distrust)
        self.rng.choice(takes + gives)()

    def allocate(self) -> None:
        if (blocks := self.pool.allocate(self.rng.randrange(1, 5))) is not None:
            self.held.append(blocks)

    def hit(self) -> None:
        found = self.pool.lookup(self.names[: self.rng.randrange(1, len(self.names))])
        self.pool.acquire(found)
        self.held.append(found)

    def release(self) -> None:
        if self.held:
            self.pool.release(self.held.pop(self.rng.randrange(len(self.held))))

    def pin(self) -> None:
        if self.held:
            self.pinned.append(self.rng.choice(self.held))
            self.pool.pin(self.pinned[-1])

    def unpin(self) -> None:
        if self.pinned:
            self.pool.unpin(self.pinned.pop(self.rng.randrange(len(self.pinned))))

    def register(self) -> None:
        """Names some blocks, mostly in the order of the sequence, and others in ways that it does not know."""
        missing = [name for name in self.names if self.pool.find(name) is None]
        others = [BlockHash(self.rng.randbytes(32)) for _ in range(2)]
        held = [block for block in dict.fromkeys(chain(*self.held)) if not self.pool.has_tainted([block])]
        unnamed = [block for block in held if self.pool.hash_of(block) is None]
        for block, name in zip(unnamed, self.rng.choice((missing, missing[::-1], others)), strict=False):
            self.pool.register(block, name)

    def distrust(self) -> None:
        block_hash = self.pool.hash_of(self.rng.randrange(self.pool.num_blocks))
        self.pool.distrust([] if block_hash is None else [block_hash])


@pytest.mark.parametrize("seed", range(40))
def test_a_sequence_that_fits_is_never_told_to_lack_blocks(seed: int) -> None:
    """However blocks are taken, given back, named, evicted and distrusted meanwhile."""
    history = _History(seed)
    sequence, pool = history.sequence, history.pool
    shortage = None
    for _ in range(400):
        history.move()
        num_kept = history.rng.choice((0, 0, 0, 2))
        if shortage is not None and shortage.persists(sequence, pool, num_kept=num_kept):
            assert find_shortage(sequence, pool, num_kept=num_kept) is not None
        else:
            shortage = find_shortage(sequence, pool, num_kept=num_kept)
