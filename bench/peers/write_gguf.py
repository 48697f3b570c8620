"""Writes a model of bench/random_model.py as GGUF. It runs in llama.cpp's environment.

    python write_gguf.py MODEL_DIR OUT_FILE bf16|f16

llama.cpp's own converter identifies tokenizers by a hash and refuses ours. Matrices stay bfloat16 or become float16, as
the last argument says, and vectors become float32, as in that converter.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found]
import numpy as np
from numpy.typing import NDArray

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def main() -> None:
    model, out, weights = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    config = json.loads((model / "config.json").read_text())
    partial = out.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, config["model_type"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if weights == "f16" else gguf.LlamaFileType.MOSTLY_BF16)
    _add_shape(writer, config)
    _add_vocabulary(writer, model)
    for name, tensor in _tensors(model / "model.safetensors"):
        _add_tensor(writer, name, tensor, config, is_half=weights == "f16")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(out)


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])


def _add_vocabulary(writer: Any, model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary | special, key=(vocabulary | special).__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_token_types([kinds[token in special] for token in tokens])
    writer.add_token_merges(["\u0120 t"])  # llama.cpp requires at least one merge; prompts are token ids
    writer.add_bos_token_id(special["<|begin|>"])
    writer.add_eos_token_id(special["<|end|>"])
    writer.add_pad_token_id(special["<|pad|>"])
    writer.add_add_bos_token(False)


def _tensors(file: Path) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Yields each tensor's name and its bfloat16 bits. A safetensors file is the header's length in 8 bytes, a JSON
    header, and the data."""
    data = np.memmap(file, mode="r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
            first, last = entry["data_offsets"]
            yield name, data[start + first : start + last].view(np.uint16).reshape(entry["shape"])


def _add_tensor(writer: Any, name: str, tensor: NDArray[np.uint16], config: dict[str, Any], *, is_half: bool) -> None:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        number, _, part = module.removeprefix("model.layers.").partition(".")
        target = f"blk.{number}.{_LAYER_NAMES[part]}.{kind}"
        if config["model_type"] == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if part == "self_attn.q_proj" else "num_key_value_heads"]
            tensor = _interleaved(tensor, heads)
    else:
        target = f"{_NAMES[module]}.{kind}"
    if tensor.ndim == 1 or is_half:
        values = (tensor.astype(np.uint32) << 16).view(np.float32)
        writer.add_tensor(target, values.astype(np.float16) if tensor.ndim > 1 else values)
    else:
        raw = np.ascontiguousarray(tensor).view(np.uint8)
        writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _interleaved(weight: NDArray[np.uint16], heads: int) -> NDArray[np.uint16]:
    """Returns `weight` `[out, in]` with the two halves of every head interleaved, so that rotary pairs are adjacent:
    llama.cpp's order for the architecture `llama`."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


if __name__ == "__main__":
    main()
