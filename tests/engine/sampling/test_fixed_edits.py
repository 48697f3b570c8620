"""Biases and stop tokens become arrays once per request, which all steps and outputs of the request share."""

from fractions import Fraction

import numpy as np
import torch

from kvrelay.core.generation.sampling_params import MAX_TOKEN_ENTRIES, SamplingParams
from kvrelay.engine.gpu.sampler import GpuSampler
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.request import EngineRequest
from kvrelay.engine.runner import LaunchedStep, Runner
from kvrelay.engine.sampling.fixed_edits import NO_EDITS, FixedEdits, fixed_edits
from kvrelay.engine.sampling.sampler import Sampler, SamplingRow
from tests.engine.harness import Harness, prompt_of


class WatchingRunner:
    """A runner that keeps what the sampling rows of each step refer to."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.fixed: list[FixedEdits] = []

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        self.fixed += [row.fixed for entry in plan.scheduled for row in entry.rows]
        return self._runner.launch(plan)


def test_all_steps_and_outputs_of_a_request_share_one() -> None:
    watched: list[WatchingRunner] = []

    def watch(runner: Runner) -> Runner:
        watched.append(WatchingRunner(runner))
        return watched[0]

    harness = Harness(wrap=watch)
    params = SamplingParams(
        n=3, seed=1, max_tokens=5, ignore_eos=True, logit_bias={7: 1.0}, stop_token_ids=(10**9,), min_tokens=5
    )
    harness.engine.add(EngineRequest("a", tuple(prompt_of(20)), params))
    harness.run()
    fixed = watched[0].fixed
    assert len(fixed) == 3 * 5 and set(map(id, fixed)) == {id(fixed[0])}
    assert fixed[0].biased_ids.tolist() == [7] and fixed[0].stop_ids.tolist() == [10**9]
    harness.engine.check_idle()


def test_tokens_are_distinct_and_ascending() -> None:
    biases = ((9, -2.0), (4, Fraction(1, 2)), (5, np.float32(2.0)))
    fixed = fixed_edits(SamplingParams(logit_bias=biases, stop_token_ids=(8, 3, 8)))  # type: ignore[arg-type]
    assert fixed.biased_ids.tolist() == [4, 5, 9] and fixed.biases.tolist() == [0.5, 2.0, -2.0]
    assert fixed.stop_ids.tolist() == [3, 8] and fixed.stop_token_ids == {3, 8}
    assert fixed_edits(SamplingParams()) is NO_EDITS


def test_as_many_as_are_allowed_change_the_same_logits_on_both_devices() -> None:
    vocab_size, eos = 2 * MAX_TOKEN_ENTRIES, 3
    params = SamplingParams(
        seed=1,
        temperature=0.0,
        min_tokens=4,
        logit_bias=dict.fromkeys(range(0, vocab_size, 2), 1.0),
        stop_token_ids=range(MAX_TOKEN_ENTRIES, vocab_size),
    )
    row = SamplingRow(params, 0, 9, 1, None, fixed_edits(params))
    logits = torch.zeros(1, vocab_size)
    logits[0, 5], logits[0, 8], logits[0, -2], logits[0, eos] = 1.5, 0.9, 9.0, 9.0
    [sampled] = Sampler([eos]).sample(logits, [row])
    assert sampled.token_id == 8

    arrays = GpuSampler([eos]).arrays([row])
    tokens, biases, flags = (arrays[f"sampling.edit_{name}"] for name in ("tokens", "biases", "flags"))
    assert sorted(tokens.tolist()) == sorted({*range(0, vocab_size, 2), *params.stop_token_ids, eos})
    assert np.array_equal(biases == 1.0, tokens % 2 == 0)
    assert np.array_equal(flags != 0, (tokens >= MAX_TOKEN_ENTRIES) | (tokens == eos))
