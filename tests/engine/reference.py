"""transformers as the reference for whatever runs a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """A model of transformers, in float32 with eager attention."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Returns greedy tokens, ignoring end tokens."""
        output = self._generate(prompt, max_tokens)
        return [int(token) for token in output.sequences[0, len(prompt) :]]

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns `[num_tokens, vocab_size]`: row i predicts the token after token i."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return logits

    def decode_logits(self, prompt: Sequence[int], rest: Sequence[int]) -> torch.Tensor:
        """Returns the logits of `rest`, fed one token at a time after `prompt`: `[len(rest), vocab_size]`."""
        continued = [*rest, 0]  # the last one is not fed
        output = self._generate(
            prompt,
            len(continued),
            output_logits=True,
            prefix_allowed_tokens_fn=lambda _, token_ids: [continued[len(token_ids) - len(prompt)]],
        )
        return torch.cat(output.logits[1:])

    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns `[num_tokens, vocab_size]`: row i is about token i + 1."""
        return torch.log_softmax(self.logits(token_ids).float(), dim=-1)

    def _generate(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> Any:
        input_ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            return self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                **options,
            )
