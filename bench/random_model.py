"""Random-weight models of real shapes, for measuring speed without downloading anything.

    python -m bench.random_model OUT_DIR --shape qwen2-0.5b

writes a Hugging Face directory: bfloat16 safetensors, `config.json`, and a byte-level tokenizer in which every id
decodes to text. With `--quantization` the matrices of the layers are random 4-bit codes in that format, in groups of
128.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from bench.arguments import script_parser

PrequantizedMethod = Literal["awq", "gptq", "gptq_v2", "gptq_desc_act"]
GROUP_SIZE = 128
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP_SIZE, "sym": True, "desc_act": False}
QUANTIZATION_CONFIGS: Mapping[PrequantizedMethod, Mapping[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP_SIZE, "zero_point": True, "version": "gemm"},
    "gptq": _GPTQ,
    "gptq_v2": {**_GPTQ, "checkpoint_format": "gptq_v2"},
    "gptq_desc_act": {**_GPTQ, "desc_act": True},
}

BOS_TOKEN, EOS_TOKEN, PAD_TOKEN = "<|begin|>", "<|end|>", "<|pad|>"
BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID = 256, 257, 258
MIN_VOCAB_SIZE = 260

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def qwen2_0_5b() -> PreTrainedConfig:
    """Qwen2.5-0.5B with a smaller vocabulary."""
    return Qwen2Config(
        vocab_size=32_000,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
    )


def llama_1b() -> PreTrainedConfig:
    """Llama 3.2 1B."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
    )


def llama_8b() -> PreTrainedConfig:
    """Llama 3.1 8B."""
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=False,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
    )


def tiny() -> PreTrainedConfig:
    """Small enough to write and load in a second."""
    return LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
    )


def small() -> PreTrainedConfig:
    """Like tiny, in sizes that divide into groups of quantised weights."""
    config = tiny()
    config.update({"hidden_size": 512, "intermediate_size": 1024})
    return config


SHAPES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen2-0.5b": qwen2_0_5b,
    "llama-1b": llama_1b,
    "llama-8b": llama_8b,
    "small": small,
    "tiny": tiny,
}


def write_random_model(
    directory: Path,
    shape: str,
    *,
    seed: int = 0,
    quantization: PrequantizedMethod | None = None,
    device: str = "cpu",
) -> Path:
    """Writes the model and its tokenizer into `directory`, created if needed, and returns it. Weights are drawn on
    `device`, and are others on each kind. Raises ValueError for a shape that does not divide into groups."""
    config = SHAPES[shape]()
    if quantization is not None and (config.hidden_size % GROUP_SIZE or config.intermediate_size % GROUP_SIZE):
        raise ValueError(f"the sizes of the shape {shape} are not multiples of {GROUP_SIZE}: choose another --shape")
    directory.mkdir(parents=True, exist_ok=True)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if quantization is not None and name.endswith("_proj.weight"):
            tensors |= _random_codes(name.removesuffix("weight"), tensor.shape, quantization, generator)
        else:
            tensors[name] = _random(name, tensor.shape, generator)
    if quantization is not None:
        path = directory / "config.json"
        fields = json.loads(path.read_text()) | {"quantization_config": QUANTIZATION_CONFIGS[quantization]}
        path.write_text(json.dumps(fields, indent=2))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_byte_tokenizer(directory, vocab_size=config.vocab_size)
    return directory


def kept_model(directory: Path, shape: str) -> Path:
    """Returns the model of a shape that is kept in `directory` between runs. It is written once, and has its name only
    when it is whole."""
    model = directory / "models" / shape
    if not model.is_dir():
        write_random_model(model.with_name(f"{shape}.partial"), shape).rename(model)
    return model


def write_byte_tokenizer(directory: Path, *, vocab_size: int) -> None:
    """Writes a tokenizer whose ids below 256 are single bytes, followed by three special tokens. All further ids decode
    to words like " t300", which no text is encoded to."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    specials = {BOS_TOKEN: BOS_TOKEN_ID, EOS_TOKEN: EOS_TOKEN_ID, PAD_TOKEN: PAD_TOKEN_ID}
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | specials
    # U+0120 is the space of byte-level BPE.
    vocabulary |= {f"\u0120t{index}": index for index in range(len(vocabulary), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    weights = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return weights.normal_(0.0, 0.02, generator=generator).cpu()


def _random_codes(
    prefix: str, shape: torch.Size, method: PrequantizedMethod, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Returns the tensors of one quantised matrix. Codes are uniform around the middle, and scales make the weights
    spread about as much as those of `_random`."""
    num_outputs, num_inputs = shape
    num_groups = num_inputs // GROUP_SIZE
    code_shape = (num_inputs, num_outputs // 8) if method == "awq" else (num_inputs // 8, num_outputs)
    empty = partial(torch.empty, device=generator.device)
    codes = empty(code_shape, dtype=torch.int32).random_(-(2**31), 2**31 - 1, generator=generator).cpu()
    # Every zero point is 8; GPTQ's first format stores one less.
    middle = -0x77777778 if method in ("awq", "gptq_v2") else 0x77777777
    zeros = torch.full((num_groups, num_outputs // 8), middle, dtype=torch.int32)
    spread = 0.02 / (16**2 / 12) ** 0.5
    scales = empty(num_groups, num_outputs).uniform_(0.8 * spread, 1.2 * spread, generator=generator).cpu()
    tensors = {"qweight": codes, "qzeros": zeros, "scales": scales.half()}
    if method != "awq":
        order = torch.arange(num_inputs)
        if method == "gptq_desc_act":  # equal for all matrices of as many inputs, since some of them are joined
            order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(num_inputs))
        tensors["g_idx"] = (order // GROUP_SIZE).int()
    return {prefix + kind: tensor for kind, tensor in tensors.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__file__, __doc__)
    parser.add_argument("directory", type=Path, metavar="OUT_DIR", help="where to write; created if needed")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-0.5b", help="sizes of the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument(
        "--quantization", choices=get_args(PrequantizedMethod), help="write 4-bit weights in this format"
    )
    arguments = parser.parse_args(argv)
    try:
        directory = write_random_model(
            arguments.directory, arguments.shape, seed=arguments.seed, quantization=arguments.quantization
        )
    except ValueError as error:
        parser.error(str(error))
    size = (directory / "model.safetensors").stat().st_size
    print(f"{directory}: {arguments.shape}, {size / 1e6:.0f} MB of weights")


if __name__ == "__main__":
    main()
