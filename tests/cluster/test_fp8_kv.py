"""A cluster with an FP8 KV cache gives the tokens of one process with such a cache."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.offline.llm import LLM
from tests.cluster.cluster import cluster
from tests.cluster.prompts import VOCAB_SIZE, prompt_of
from tests.engine.tiny_models import make_tiny_model

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True, "dtype": "float32", "threads": 1}
PROMPTS = [prompt_of(length) for length in (1, 16, 33, 100, 300)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PARALLEL: dict[str, Any] = {"temperature": 0.9, "seed": 5, "n": 2, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("fp8"), vocab_size=VOCAB_SIZE, with_tokenizer=True)


def tokens_of(llm: LLM, sampling: dict[str, Any]) -> list[dict[int, list[int]]]:
    """Returns the tokens for each prompt, by output."""
    generations = llm.generate(PROMPTS, SamplingParams(**sampling), progress=False)
    return [{output.index: list(output.token_ids) for output in one.outputs} for one in generations]


async def test_a_prompt_prefilled_elsewhere_has_the_tokens_of_one_process(model: Path) -> None:
    """Parallel outputs write to copies of a block."""
    alone = LLM(str(model), num_blocks=128, **FP8)
    expected = [tokens_of(alone, sampling) for sampling in (GREEDY, PARALLEL)]
    plain = LLM(str(model), num_blocks=128, dtype="float32", threads=1)
    assert expected[0] != tokens_of(plain, GREEDY), "quantising is felt, or this test shows nothing"
    async with cluster(model, connector="shared_memory", **FP8) as running:
        for sampling, tokens in zip((GREEDY, PARALLEL), expected, strict=True):
            served = await asyncio.gather(*(running.generate(prompt, **sampling) for prompt in PROMPTS))
            assert [result.tokens for result in served] == tokens
            assert all(result.how.kv.num_recomputed_tokens == 0 for result in served)
            if sampling is GREEDY:
                fetched = [result.how.kv.num_prefill_node_blocks for result in served]
                assert fetched == [-(-len(prompt) // 16) for prompt in PROMPTS], "all of it"
