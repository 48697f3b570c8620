"""From options to an engine: what is chosen by the model, and refused before its weights are read."""

import logging
from pathlib import Path

import pytest
from transformers import LlamaConfig

from kvrelay import LLM, SamplingParams
from kvrelay.core.errors import ConfigurationError
from tests.engine.reference import Reference
from tests.engine.tiny_models import FAMILIES, save_random

PROMPT = [7, 8, 9, 10, 11] * 8


@pytest.fixture(scope="module")
def odd_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with heads that the compiled kernels do not take."""
    config = FAMILIES["llama"]()
    assert isinstance(config, LlamaConfig)
    config.head_dim = 20
    config.vocab_size = 320
    return save_random(config, tmp_path_factory.mktemp("odd-heads"), with_tokenizer=True)


def test_heads_that_the_compiled_kernels_do_not_take_are_computed_by_torch(
    odd_heads: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(odd_heads), threads=1, num_blocks=64, max_model_len=256)
    assert "not 20 (head_dim)" in caplog.text
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    [result] = llm.generate([PROMPT], sampling, progress=False)
    assert list(result.outputs[0].token_ids) == Reference(odd_heads).generate(PROMPT, 12)
    llm._engine.check_idle()


def test_compiled_kernels_that_were_asked_for_refuse_such_heads_before_the_weights_are_read(
    odd_heads: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(ConfigurationError, match=r"--attention-backend native: .* 20"):
        LLM(str(odd_heads), threads=1, num_blocks=64, max_model_len=256, attention_backend="native")
    assert "loading" not in caplog.text
