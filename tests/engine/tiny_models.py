"""Models of every supported family with random weights, made and saved by transformers itself.

They are small enough to run in milliseconds. Their weights (biases and norms too) are spread widely, so that every part
of the computation matters and the most likely token is rarely a close call. All of them take prompts of up to 4,096
tokens.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from bench.random_model import BOS_TOKEN_ID, EOS_TOKEN_ID, write_byte_tokenizer

SLIDING_WINDOW = 24

_SIZES: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=512)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=1024)
_SLIDING_BY_LAYER: Mapping[str, Any] = {
    "sliding_window": SLIDING_WINDOW,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
_QWEN_SLIDING: Mapping[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": SLIDING_WINDOW,
    "max_window_layers": 1,
}

FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama-tied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "llama-mha": lambda: LlamaConfig(**{**_SIZES, "num_key_value_heads": 4}),
    "llama-mqa": lambda: LlamaConfig(**{**_SIZES, "num_key_value_heads": 1}),
    "llama-bias": lambda: LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "llama-rope-llama3": lambda: LlamaConfig(**_SIZES, **_LLAMA3),
    "llama-rope-linear": lambda: LlamaConfig(**_SIZES, **_rope("linear", factor=4.0)),
    "llama-rope-dynamic": lambda: LlamaConfig(**_SIZES, **_rope("dynamic", factor=2.0)),
    "llama-rope-yarn": lambda: LlamaConfig(**_SIZES, **_YARN),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=None, head_dim=32),
    "mistral-sliding": lambda: MistralConfig(**_SIZES, sliding_window=SLIDING_WINDOW),
    "mistral-sliding-by-layer": lambda: MistralConfig(**_SIZES, **_SLIDING_BY_LAYER),
    "qwen2": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen2-sliding": lambda: Qwen2Config(**_SIZES, **_QWEN_SLIDING),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen3-bias-sliding": lambda: Qwen3Config(**_SIZES, head_dim=32, attention_bias=True, **_QWEN_SLIDING),
}
"""Configuration of each model by the name that `make_tiny_model` takes; the vocabulary's size is set there."""


def make_tiny_model(
    family: str,
    directory: Path,
    *,
    vocab_size: int = 320,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    with_tokenizer: bool = False,
) -> Path:
    """Writes the model into `directory` and returns it. `vocab_size` must be at least 260 with a tokenizer."""
    config = FAMILIES[family]()
    config.vocab_size = vocab_size
    return save_random(config, directory, seed=seed, dtype=dtype, with_tokenizer=with_tokenizer)


def save_random(
    config: PreTrainedConfig,
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    with_tokenizer: bool = False,
    max_shard_size: str = "1GB",
) -> Path:
    """Saves a model of `config` with every parameter drawn from `seed`, whatever else the process has drawn."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter.shape, generator))
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if with_tokenizer:
        write_byte_tokenizer(directory, vocab_size=config.vocab_size)
    return directory


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.empty(shape).normal_(generator=generator)
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * drawn
    if name.endswith(".bias"):
        return 0.5 * drawn
    return 0.2 * drawn
