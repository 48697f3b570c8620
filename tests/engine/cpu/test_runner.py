"""Plans carried out with a real model: every sampling row reads the logits of its own sequence's last token."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_kernels.registry import select_backend
from torch import Tensor

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.cpu.runner import CpuRunner
from kvrelay.engine.loading.loader import load_model
from kvrelay.engine.plan import UNKNOWN_TOKEN, ScheduledSequence, SchedulerOutput
from kvrelay.engine.sampling.sampler import NO_TOKEN, Sampler, SamplingRow
from tests.engine.tiny_models import make_tiny_model

BLOCK_SIZE = 16
PROMPT = (5, 77, 200)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> CpuRunner:
    model = make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"), vocab_size=320)
    loaded = load_model(str(model), dtype="float32", attention=select_backend("reference"), max_model_len=None)
    config = loaded.config
    pool = torch.zeros(8, config.num_kv_heads, config.num_layers, 2, BLOCK_SIZE, config.head_dim)
    return CpuRunner(loaded.model, Sampler(config.eos_token_ids), pool)


def greedy_prompt(n: int, block_id: int = 0) -> ScheduledSequence:
    sampling = SamplingParams(n=n, temperature=0.0, seed=0)
    rows = tuple(SamplingRow(sampling, choice, len(PROMPT), 0) for choice in range(n))
    return ScheduledSequence(token_ids=PROMPT, start=0, block_table=[block_id], rows=rows)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_parallel_outputs_start_from_the_prompts_last_token(runner: CpuRunner, n: int) -> None:
    """Also with as many outputs as tokens in the step, which then resembles a batch of decodes."""
    [alone] = runner.launch(SchedulerOutput((greedy_prompt(1),), ())).collect().results
    [together] = runner.launch(SchedulerOutput((greedy_prompt(n),), ())).collect().results
    assert [sampled.token_id for sampled in together.sampled] == [alone.sampled[0].token_id] * n


def test_a_chunk_without_rows_lends_its_tokens_to_nobody(runner: CpuRunner) -> None:
    """The step has six tokens and six rows, all rows of the second sequence."""
    [alone] = runner.launch(SchedulerOutput((greedy_prompt(1),), ())).collect().results
    chunk = ScheduledSequence(token_ids=(9, 8, 7), start=0, block_table=[1], rows=())
    _, together = runner.launch(SchedulerOutput((chunk, greedy_prompt(6)), ())).collect().results
    assert [sampled.token_id for sampled in together.sampled] == [alone.sampled[0].token_id] * 6


def test_a_row_of_the_step_before_is_the_input(runner: CpuRunner) -> None:
    """The input is the second row of a step with two prompts."""
    prompts = (greedy_prompt(1), replace(greedy_prompt(1, block_id=1), token_ids=(9, 8, 7)))
    first = runner.launch(SchedulerOutput(prompts, ())).collect().results[1].sampled[0].token_id
    row = replace(prompts[1].rows[0], position=4, num_output_tokens=1)
    unknown = ScheduledSequence((UNKNOWN_TOKEN,), start=3, block_table=[1], rows=(row,), input_row=1)
    ahead = runner.launch(SchedulerOutput((unknown,), ())).collect()
    known = replace(unknown, token_ids=(first,), input_row=None)
    assert ahead == runner.launch(SchedulerOutput((known,), ())).collect()


def test_a_step_without_finite_logits_has_no_token_and_the_next_one_has(
    runner: CpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has computed stays as it is, however often it is collected, and a step that runs ahead can begin."""
    plan = SchedulerOutput((greedy_prompt(1),), ())
    expected = runner.launch(plan).collect()
    forward = runner._model.forward
    with monkeypatch.context() as patched:
        patched.setattr(runner._model, "forward", lambda *args, **kwargs: forward(*args, **kwargs) * torch.nan)
        failing = runner.launch(plan)
    for _ in range(2):
        assert [token.token_id for result in failing.collect().results for token in result.sampled] == [NO_TOKEN]
    ahead = ScheduledSequence(token_ids=(UNKNOWN_TOKEN,), start=3, block_table=[1], rows=(), input_row=0)
    runner.launch(SchedulerOutput((ahead,), ())).collect()
    assert runner.launch(plan).collect() == expected


def test_tokens_that_nobody_reads_leave_before_the_last_layers_products(
    runner: CpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = ScheduledSequence(token_ids=(9, 8, 7), start=0, block_table=[1], rows=())
    decode = replace(greedy_prompt(1), token_ids=(5,))
    forward, left = runner._model.forward, []

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        hidden = forward(*args, **kwargs)
        left.append(len(hidden))
        return hidden

    monkeypatch.setattr(runner._model, "forward", counting)
    for scheduled in (
        (greedy_prompt(1),),
        (greedy_prompt(4),),
        (chunk, greedy_prompt(1)),
        (chunk,),
        (chunk, replace(greedy_prompt(1), prompt_logprobs=(0, (77, 200)))),
        (decode, replace(decode, block_table=[1])),
    ):
        runner.launch(SchedulerOutput(scheduled, ())).collect()
    assert left == [1, 1, 1, 0, 6, 2]
