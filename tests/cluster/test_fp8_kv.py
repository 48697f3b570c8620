"""An FP8 KV cache in a cluster: the tokens of one process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.sampling_params import SamplingParams
from kvrelay.offline.llm import LLM
from tests.cluster.cluster import cluster
from tests.cluster.test_equality import VOCAB_SIZE, prompt_of
from tests.engine.tiny_models import make_tiny_model

FP8: dict[str, Any] = {"kv_cache_dtype": "fp8", "calculate_kv_scales": True, "dtype": "float32", "threads": 1}
PROMPTS = [prompt_of(length) for length in (1, 16, 33, 100, 300)]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("fp8"), vocab_size=VOCAB_SIZE, with_tokenizer=True)


async def test_a_prompt_prefilled_elsewhere_has_the_tokens_of_one_process(model: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    expected, plain = (
        [
            list(one.outputs[0].token_ids)
            for one in LLM(str(model), num_blocks=128, **options).generate(PROMPTS, sampling, progress=False)
        ]
        for options in (FP8, {"dtype": "float32", "threads": 1})
    )
    assert expected != plain, "quantising is felt, or this test shows nothing"
    async with cluster(model, connector="shared_memory", **FP8) as running:
        served = await asyncio.gather(*(running.generate(prompt, max_tokens=MAX_TOKENS) for prompt in PROMPTS))
        for prompt, result in zip(PROMPTS, served, strict=True):
            assert result.how.kv.num_prefill_node_blocks == -(-len(prompt) // 16), "all of it was fetched"
            assert result.how.kv.num_recomputed_tokens == 0
    assert [result.tokens[0] for result in served] == expected
