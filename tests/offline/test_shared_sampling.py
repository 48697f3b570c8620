"""Sampling parameters that many prompts of a batch have in common."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay import LLM, SamplingParams
from tests.checked_fields import note_checks
from tests.engine.tiny_models import make_tiny_model


def test_biases_are_checked_once_however_many_prompts_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be 65,536 of them, and thousands of prompts."""
    checked = note_checks(monkeypatch)
    make_tiny_model("llama", tmp_path, with_tokenizer=True)
    llm = LLM(tmp_path, threads=1, num_blocks=64, max_model_len=64, max_num_seqs=4)
    sampling = SamplingParams(temperature=0.0, logit_bias={7: 100.0}, max_tokens=2, ignore_eos=True)
    prompts = [[5, 6], [6, 7], [7, 8]]
    assert [result.outputs[0].token_ids for result in llm.generate(prompts, sampling, progress=False)] == [(7, 7)] * 3
    assert checked.count("logit_bias") == 1
    llm.generate(prompts, [sampling, replace(sampling, max_tokens=3), sampling], progress=False)
    assert checked.count("logit_bias") == 1 + 2
    llm._engine.check_idle()
