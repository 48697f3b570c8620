"""What transformers' own `generate` says: the oracle of every cluster test."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.cluster.cluster import Cluster


class Reference:
    """A model in float32 with eager attention."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy; end tokens are ignored."""
        input_ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            output = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [int(token) for token in output[0, len(prompt) :]]

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """`[num_tokens, vocab_size]`: row i is about token i + 1."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


async def check(running: Cluster, reference: Reference, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    """Asked for all prompts at the same time, the cluster says what the reference says."""
    served = await asyncio.gather(*(running.generate(prompt, max_tokens=max_tokens) for prompt in prompts))
    for prompt, result in zip(prompts, served, strict=True):
        assert result.tokens[0] == reference.generate(prompt, max_tokens), f"prompt of {len(prompt)} tokens"
        assert result.how.prefill_node == "prefill-0"
