"""Blocks of which others have refused copies: nobody finds them, nor what is computed behind them."""

import pytest

from kvrelay.core.kv.block_hash import BlockHash
from tests.engine.fake_runner import expected_output
from tests.engine.harness import BLOCK_SIZE, Harness, produce, prompt_of, request

PROMPT = prompt_of(8 * BLOCK_SIZE + 3)
CHUNK = 2 * BLOCK_SIZE


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_what_is_computed_behind_a_distrusted_block_is_not_found(*, run_ahead: bool, held: bool) -> None:
    """Its digest would match. `held`: a transfer still holds the block."""
    harness = Harness(run_ahead=run_ahead, max_num_batched_tokens=CHUNK, publish=True)
    engine = harness.engine
    engine.add(request("doubtful", PROMPT))
    named: list[BlockHash] = []
    while not named:
        harness.step()
        named = [block.block_hash for result in harness.results for block in result.named]
    block_id = engine.pool.find(named[1])
    assert block_id is not None
    if held:
        engine.pool.pin([block_id])
    for block_hash in (BlockHash(bytes(32)), named[1]):
        engine.distrust(block_hash)
    harness.results.clear()
    harness.run()
    assert harness.tokens["doubtful", 0] == expected_output(PROMPT, 8), "it goes on"
    assert not [block for result in harness.results for block in result.named]
    engine.add(request("good", PROMPT))
    harness.run()
    assert harness.tokens["good", 0] == expected_output(PROMPT, 8)
    if held:
        engine.unpin([block_id])
    engine.add(request("later", PROMPT))
    harness.run()
    prompts = [prompt for result in harness.results for prompt in result.prompts]
    num_cached = {prompt.request_id: prompt.num_cached_tokens for prompt in prompts}
    assert num_cached["good"] == BLOCK_SIZE, "only what comes before it"
    assert num_cached["later"] == (1 if held else 8) * BLOCK_SIZE
    engine.check_idle()


def test_what_was_computed_behind_it_before_is_forgotten_too() -> None:
    """Also by another prompt that begins like this one. The tail is a block, too."""
    harness = Harness(publish=True)
    other = PROMPT[: 4 * BLOCK_SIZE] + prompt_of(4 * BLOCK_SIZE, seed=1)
    for request_id, prompt in (("first", PROMPT), ("other", other)):
        produce(harness, request_id, prompt)
        harness.engine.release_lease(request_id)
    names = [block.block_hash for result in harness.results for block in result.named]
    assert len(set(names)) == 8 + 1 + 4
    harness.engine.distrust(names[1])
    harness.run()
    assert harness.engine.pool.drain_changes() == ([], []), "they were reported"
    removed = {name for result in harness.results for name in result.removed}
    assert removed == set(names) - {names[0]} == {name for result in harness.results for name in result.distrusted}
    harness.engine.check_idle()


@pytest.mark.parametrize("run_ahead", [False, True])
def test_what_follows_a_copy_of_a_forgotten_block_is_not_named(*, run_ahead: bool) -> None:
    """The copy got no name while a lease pinned the distrusted block. No name leads from what follows it to the block
    before both."""
    harness = Harness(run_ahead=run_ahead, max_num_batched_tokens=BLOCK_SIZE, publish=True)
    engine, pool = harness.engine, harness.engine.pool
    produce(harness, "leased", PROMPT[: 2 * BLOCK_SIZE])
    first, second = [block.block_hash for result in harness.results for block in result.named]
    engine.distrust(second)
    engine.add(request("longer", PROMPT))
    for _ in range(2 if run_ahead else 1):  # until its copy has been collected
        harness.step()
    assert pool.find(second) is not None
    engine.release_lease("leased")
    harness.run()
    assert harness.tokens["longer", 0] == expected_output(PROMPT, 8)
    stored = [name for result in harness.results for name in result.stored]
    assert [name for name in stored if pool.find(name) is not None] == [first]
    engine.distrust(first)
    assert [name for name in stored if pool.find(name) is not None] == []
    engine.check_idle()
