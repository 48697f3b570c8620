"""Logits of every family, through a paged pool, compared with those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_kernels.cpu.extension import load_extension
from paged_kernels.registry import BackendName, select_backend
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from kvrelay.core.config.option_types import DTypeName
from kvrelay.engine.loading.loader import LoadedModel, load_model
from tests.engine.paged_run import PagedRun
from tests.engine.reference import Reference
from tests.engine.tiny_models import FAMILIES, SLIDING_WINDOW, make_tiny_model, save_random

BACKENDS: tuple[BackendName, ...] = ("reference",) if load_extension() is None else ("reference", "native")
PROMPT_LENGTH = 75  # not a multiple of the block size, and three times the sliding window


def test_the_prompt_is_longer_than_the_window() -> None:
    assert PROMPT_LENGTH > 3 * SLIDING_WINDOW


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(family: str, backend: BackendName, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    prompt = _tokens(PROMPT_LENGTH, seed=1)
    expected = Reference(tmp_path).logits(prompt)
    loaded = _load(tmp_path, backend=backend)

    whole = PagedRun(loaded.model, num_sequences=1, max_tokens=PROMPT_LENGTH).step([prompt])[0]
    _assert_close(whole, expected)

    run = PagedRun(loaded.model, num_sequences=1, max_tokens=PROMPT_LENGTH, seed=2)
    chunks = [run.step([prompt[begin:end]])[0] for begin, end in ((0, 16), (16, 23), (23, 60), (60, 61), (61, 75))]
    _assert_close(torch.cat(chunks), expected)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "qwen3"])
def test_sequences_of_a_step_do_not_see_each_other(family: str, tmp_path: Path) -> None:
    loaded = _load(make_tiny_model(family, tmp_path))
    prompts = [_tokens(length, seed=length) for length in (1, 16, 33, 40)]
    run = PagedRun(loaded.model, num_sequences=4, max_tokens=41)
    first = run.step([prompt[:-1] or prompt for prompt in prompts])
    last = run.step([[7]] + [prompt[-1:] for prompt in prompts[1:]])
    for prompt, head, tail in zip(prompts[1:], first[1:], last[1:], strict=True):
        _assert_close(torch.cat((head, tail)), Reference(tmp_path).logits(prompt))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("last_of", [(0, 1, 2, 3), (1, 3), (2,), ()])
@pytest.mark.parametrize("family", ["llama-mqa", "mistral-sliding", "qwen3"])
def test_tokens_whose_results_nobody_reads_may_leave_before_the_end(
    family: str, last_of: tuple[int, ...], backend: BackendName, tmp_path: Path
) -> None:
    """Logits and the KV of all tokens are those of a step whose results are all read."""
    model = _load(make_tiny_model(family, tmp_path), backend=backend).model
    chunks = [_tokens(length, seed=length) for length in (1, 16, 33, 40)]
    whole, some = (PagedRun(model, num_sequences=4, max_tokens=41) for _ in range(2))
    logits = whole.step(chunks)
    found = some.step(chunks, last_of)
    assert len(found) == len(last_of)
    for seq, of_last in zip(last_of, found, strict=True):
        _assert_close(of_last, logits[seq][-1:])
    assert torch.equal(some.pool.isnan(), whole.pool.isnan())
    _assert_close(some.pool.nan_to_num(), whole.pool.nan_to_num())


@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear"])
def test_stretched_positions_agree_over_the_whole_context(kind: str, tmp_path: Path) -> None:
    loaded = _load(make_tiny_model(f"llama-rope-{kind}", tmp_path))
    prompt = _tokens(1500, seed=3)
    logits = PagedRun(loaded.model, num_sequences=1, max_tokens=1500).step([prompt])[0]
    _assert_close(logits, Reference(tmp_path).logits(prompt), tolerance=1e-3)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3, "original_max_position_embeddings": 64},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 0.5,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 8.0, "truncate": False, "original_max_position_embeddings": 64},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "mscale": 0.7,
            "mscale_all_dim": 1.2,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["attention_factor", "betas", "untruncated", "mscale"],
)
def test_yarn_options_agree_with_transformers(parameters: dict[str, float], tmp_path: Path) -> None:
    config = _llama(rope_parameters={"rope_theta": 10_000.0, **parameters}, max_position_embeddings=512)
    loaded = _load(save_random(config, tmp_path))
    prompt = _tokens(300, seed=4)
    logits = PagedRun(loaded.model, num_sequences=1, max_tokens=300).step([prompt])[0]
    _assert_close(logits, Reference(tmp_path).logits(prompt), tolerance=1e-3)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "yarn", "factor": 8.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=["yarn", "yarn-said-twice", "llama3"],
)
def test_a_trained_length_beside_the_rope_parameters_is_the_one_that_counts(
    parameters: dict[str, Any], tmp_path: Path
) -> None:
    save_random(_llama(max_position_embeddings=512), tmp_path)
    path = tmp_path / "config.json"
    rope = {"rope_parameters": {"rope_theta": 10_000.0, **parameters}, "original_max_position_embeddings": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | rope))
    loaded = _load(tmp_path)
    prompt = _tokens(300, seed=4)
    logits = PagedRun(loaded.model, num_sequences=1, max_tokens=300).step([prompt])[0]
    _assert_close(logits, Reference(tmp_path).logits(prompt), tolerance=1e-3)


def test_dynamic_scaling_beyond_the_trained_length_is_that_of_token_by_token_decoding(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    save_random(_llama(rope_parameters=rope, max_position_embeddings=32), tmp_path)
    loaded = _load(tmp_path, max_model_len=128)
    prompt, rest = _tokens(30, seed=5), _tokens(40, seed=6)
    expected = Reference(tmp_path).decode_logits(prompt, rest)

    run = PagedRun(loaded.model, num_sequences=1, max_tokens=70)
    run.step([prompt])
    _assert_close(run.step([rest])[0], expected, tolerance=1e-3)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_follows_float32(backend: BackendName, family: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    prompt = _tokens(PROMPT_LENGTH, seed=7)
    loaded = _load(tmp_path, dtype="bfloat16", backend=backend)
    assert loaded.dtype is torch.bfloat16
    logits = PagedRun(loaded.model, num_sequences=1, max_tokens=PROMPT_LENGTH).step([prompt])[0]
    expected = Reference(tmp_path).logits(prompt)
    assert logits.dtype is torch.float32
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.99


def _assert_close(actual: Tensor, expected: Tensor, *, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def _llama(**changes: object) -> PreTrainedConfig:
    config = FAMILIES["llama"]().to_dict() | {"vocab_size": 320} | changes
    return LlamaConfig(**config)


def _tokens(length: int, *, seed: int) -> list[int]:
    drawn: list[int] = torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def _load(
    directory: Path,
    *,
    dtype: DTypeName = "auto",
    backend: BackendName = "reference",
    max_model_len: int | None = None,
) -> LoadedModel:
    return load_model(str(directory), dtype=dtype, attention=select_backend(backend), max_model_len=max_model_len)
