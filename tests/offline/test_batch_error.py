"""What is left of a batch in which some prompts fail: the results of all others."""

import pickle
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvrelay import LLM, BatchError, SamplingParams
from kvrelay.offline.prompts import Prompt
from tests.engine.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def test_a_prompt_that_fails_does_not_cost_the_others_their_results(tmp_path: Path) -> None:
    """The model's logits are not finite after one of its tokens, as those of a damaged checkpoint."""
    path = make_tiny_model("llama", tmp_path, with_tokenizer=True) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][ord("~")] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    llm = LLM(tmp_path, threads=1, num_blocks=64, max_model_len=64, max_num_seqs=2)
    prompts: list[Prompt] = [[ord(letter) for letter in text] for text in ("one", "t~o", "three", "f~ur", "five")]
    alone = [llm.generate(prompt, GREEDY, progress=False)[0] for prompt in prompts[::2]]
    with pytest.raises(BatchError, match=r"^prompt 1: .*not finite \(2 of 5 failed\)$") as caught:
        llm.generate(prompts, GREEDY, progress=False)
    results = caught.value.results
    assert results[1] is results[3] is None
    assert [result and result.outputs for result in results[::2]] == [result.outputs for result in alone]
    assert pickle.loads(pickle.dumps(caught.value)).results == results, "it comes from a worker process as it is"
    with pytest.raises(BatchError, match=r"^prompt 0: the model returned logits that are not finite$"):
        llm.generate(prompts[1], SamplingParams(n=2), progress=False)
    llm._engine.check_idle()
