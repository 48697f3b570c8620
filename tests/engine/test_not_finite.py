"""A fault of the hardware under a prompt: the requests that have read what it left fail, and no others."""

from dataclasses import replace

import pytest

from kvrelay.engine.plan import ModelRunnerOutput, SchedulerOutput
from kvrelay.engine.runner import LaunchedStep
from kvrelay.engine.sampling.sampler import NO_TOKEN
from tests.engine.fake_runner import FakeRunner, expected_output
from tests.engine.finished_step import FinishedStep
from tests.engine.harness import BLOCK_SIZE, Harness, prompt_of, request

PROMPT = prompt_of(4 * BLOCK_SIZE + 3)
CHUNK = 2 * BLOCK_SIZE


class FaultyRunner(FakeRunner):
    """A runner whose first step writes KV that is not finite. What is computed with it is not finite either."""

    def __init__(self) -> None:
        super().__init__(64, BLOCK_SIZE)
        self.bad: set[int] | None = None  # blocks

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        output = super().launch(plan).collect()
        results = []
        for entry, result in zip(plan.scheduled, output.results, strict=True):
            end = entry.start + len(entry.token_ids)
            written = set(entry.block_table[entry.start // BLOCK_SIZE : -(-end // BLOCK_SIZE)])
            self.bad = written if self.bad is None else self.bad - written
            if self.bad.intersection(entry.block_table):
                result = replace(result, sampled=tuple(replace(one, token_id=NO_TOKEN) for one in result.sampled))
            results.append(result)
        return FinishedStep(ModelRunnerOutput(tuple(results)))


@pytest.mark.parametrize("run_ahead", [False, True])
def test_what_a_fault_has_left_is_not_found_again(run_ahead: bool) -> None:
    """It was named after the chunk before the one whose logits show it, and offered to be published."""
    harness = Harness(
        run_ahead=run_ahead, wrap=lambda runner: FaultyRunner(), max_num_batched_tokens=CHUNK, publish=True
    )
    for request_id in ("bad", "good"):
        harness.engine.add(request(request_id, PROMPT))
        harness.run()
        failures = [failure.request_id for result in harness.results for failure in result.failures]
        assert failures == (["bad"] if request_id == "bad" else [])
        harness.results.clear()
    assert harness.tokens["good", 0] == expected_output(PROMPT, 8)
    assert harness.evicted, "nor by those who hold it under its name elsewhere"
    harness.engine.check_idle()
