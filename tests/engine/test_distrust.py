"""Blocks of which others have refused copies: nobody finds them, nor what is computed behind them."""

import pytest

from kvrelay.core.kv.block_hash import BlockHash
from tests.engine.fake_runner import expected_output
from tests.engine.harness import BLOCK_SIZE, Harness, prompt_of, request

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
    engine.distrust([named[1], BlockHash(bytes(32))])
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
