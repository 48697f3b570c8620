"""From options to an engine: what is chosen by the model, and refused before its weights are read."""

import json
import logging
from pathlib import Path

import pytest
import torch
from paged_kernels.cpu.threads import num_threads, threads_kept, use_threads
from transformers import LlamaConfig

from kvrelay import LLM, SamplingParams
from kvrelay.core.errors import ConfigurationError
from kvrelay.engine import startup
from kvrelay.engine.kv_pool import allocate_pool
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.scheduler import SchedulerConfig
from kvrelay.engine.startup import default_threads, planned_device, prepare_engine
from tests.engine.load_on_cpu import load
from tests.engine.reference import Reference
from tests.engine.tiny_models import FAMILIES, make_tiny_model, save_random

PROMPT = [7, 8, 9, 10, 11] * 8


@pytest.fixture(scope="module")
def odd_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a model with heads that the compiled kernels do not take."""
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
    with caplog.at_level(logging.INFO), pytest.raises(ConfigurationError, match=r"^attention_backend native: .* 20"):
        LLM(str(odd_heads), threads=1, num_blocks=64, max_model_len=256, attention_backend="native")
    assert "loading" not in caplog.text


def test_without_a_number_of_threads_no_more_are_used_than_there_are_cores_for_the_process(
    odd_heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch chooses by the machine's cores, whatever a container's quota is."""
    with threads_kept():
        use_threads(3, torch_multiplies=True)
        monkeypatch.setattr(startup, "available_cores", lambda: 2)
        llm = LLM(str(odd_heads), num_blocks=64, max_model_len=256)
        llm.generate([PROMPT], SamplingParams(max_tokens=1), progress=False)
        assert llm._engine.threads.num_threads == 2
        assert num_threads() == 3


def test_by_default_an_engine_has_no_more_threads_than_torch_was_told_to_use() -> None:
    """By OMP_NUM_THREADS, for example."""
    with threads_kept():
        use_threads(1, torch_multiplies=True)
        assert default_threads() == 1


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions("m", device="cuda", attention_backend="native"),
        EngineOptions("m", device="cuda", quantization="int8"),
    ],
)
def test_a_gpu_is_refused_for_what_only_cpus_can_do(options: EngineOptions) -> None:
    with pytest.raises(ConfigurationError, match="is for CPUs; leave it out, or use device cpu"):
        planned_device(options)


@pytest.mark.parametrize("family", ["llama", "llama-rope-dynamic", "llama-rope-yarn"])
def test_rotary_positions_that_no_sequence_reaches_take_no_memory(family: str, tmp_path: Path) -> None:
    whole = load(make_tiny_model(family, tmp_path)).model.rotary
    prepared = prepare_engine(EngineOptions(str(tmp_path), device="cpu", threads=1, num_blocks=80))
    table = prepared.loaded.model.rotary
    assert prepared.size.max_model_len == 80 * 16
    for kept, all_of_it in ((table.cos, whole.cos), (table.sin, whole.sin)):
        assert torch.equal(kept, all_of_it[: 80 * 16])
        assert kept.untyped_storage().nbytes() == kept.nbytes < all_of_it.nbytes


def test_yarn_stretches_the_default_length_as_far_as_the_pool_allows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tiny_model("llama-rope-yarn", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    rope = fields["rope_parameters"] | {"original_max_position_embeddings": 512}
    fields |= {"rope_parameters": rope, "max_position_embeddings": 512}  # by a factor of 4
    (tmp_path / "config.json").write_text(json.dumps(fields))
    prepared = prepare_engine(EngineOptions(str(tmp_path), device="cpu", threads=1))
    assert prepared.size.max_model_len == prepared.loaded.max_model_len == 2048
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    prepared = prepare_engine(EngineOptions(str(tmp_path), device="cpu", threads=1, num_blocks=80))
    assert prepared.size.max_model_len == 80 * 16
    assert "max_model_len is 1280 instead of the model's 2048: the pool holds no more" in caplog.text
    assert len(prepared.loaded.model.rotary.cos) == 80 * 16


def test_the_scheduler_has_the_limits_and_the_policy_of_the_options(tmp_path: Path) -> None:
    options = EngineOptions(
        str(make_tiny_model("llama", tmp_path)),
        device="cpu",
        threads=1,
        num_blocks=77,
        block_size=8,
        max_model_len=200,
        max_num_seqs=3,
        max_num_batched_tokens=48,
        max_num_mixed_tokens=24,
        scheduling_policy="priority",
    )
    prepared = prepare_engine(options)
    pool = allocate_pool(prepared.layout, prepared.size.num_blocks)
    engine = prepared.build(pool, retract=lambda block_ids: None, publish=False)
    assert engine.config == SchedulerConfig(
        block_size=8,
        max_num_seqs=3,
        max_num_batched_tokens=48,
        max_num_mixed_tokens=24,
        max_model_len=200,
        policy="priority",
    )
    engine.check_idle()
