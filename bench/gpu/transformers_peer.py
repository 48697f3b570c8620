"""transformers' continuous batching on a model of the same shape, with random weights."""

import gc
import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig


def generate_with_transformers(config: PreTrainedConfig, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Returns the seconds that all prompts take on the GPU. Raises whatever transformers raises, and RuntimeError when
    outputs are missing or short."""
    gc.collect()
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    greedy = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    inputs = [list(prompt) for prompt in prompts]
    # The first call captures graphs. It gets all of the requests, because it decides how many run at a time.
    model.generate_batch(inputs=inputs, generation_config=greedy, persistent_manager=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=inputs, generation_config=greedy, persistent_manager=True)
    seconds = time.perf_counter() - start
    missing = [name for name, output in outputs.items() if len(output.generated_tokens) != new_tokens]
    if len(outputs) != len(inputs) or missing:
        raise RuntimeError(f"{len(outputs)} of {len(inputs)} outputs, {len(missing)} of another length")
    return seconds
