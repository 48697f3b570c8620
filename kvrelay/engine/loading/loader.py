"""Loads a model from a Hugging Face directory: configuration, weights, and the fingerprint that names its KV.

Tensors with wrong names, dtypes or shapes are found from the headers of a checkpoint, before any memory is taken for
weights.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from paged_kernels.base import AttentionBackend
from paged_kernels.cpu.quantized import GROUP_SIZES

from kvrelay.core.clock import MonotonicClock
from kvrelay.core.config.option_types import DTypeName, Quantization
from kvrelay.core.errors import ConfigurationError, ModelLoadError
from kvrelay.core.model.directory import resolve_model_directory
from kvrelay.core.model.tokenizer_end import tokenizer_end_token
from kvrelay.core.process.weight_store import WeightStore
from kvrelay.engine.layers.rotary import RopeKind
from kvrelay.engine.layers.weight_format import PrequantizedTensors, Slot, WeightFormat, bits_of
from kvrelay.engine.loading.checkpoint import (
    INTEGER_DTYPE,
    WEIGHT_DTYPES,
    Checkpoint,
    StoredTensor,
    open_checkpoint,
)
from kvrelay.engine.loading.checkpoint_reader import hold_equal_values, read_tensors
from kvrelay.engine.loading.shared_weights import place_for
from kvrelay.engine.loading.stored_kv_scales import is_kv_scale
from kvrelay.engine.loading.weight_bytes import CountedMemory, refusing_weights_that_do_not_fit, weight_bytes
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.models.model_config import ModelConfig, load_model_config

_logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called on the loading thread with (bytes done, bytes in all), first with 0 done."""

FINGERPRINT_VERSION = 1  # raised by every change after which KV computed before it must not be used

_CPU = torch.device("cpu")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `fingerprint` is 32 bytes; models with the same fingerprint compute the same KV from the
    same tokens. `max_model_len` is in tokens. `checkpoint` is where the weights came from."""

    model: DecoderForCausalLM
    config: ModelConfig
    dtype: torch.dtype
    max_model_len: int
    fingerprint: bytes
    load_seconds: float
    checkpoint: Checkpoint


def load_model(
    path: str,
    *,
    dtype: DTypeName,
    attention: AttentionBackend,
    max_model_len: int | None,
    quantization: Quantization = "none",
    device: torch.device = _CPU,
    weight_store: WeightStore | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads the model at `path`: a directory, or a Hugging Face id that is in the local cache.

    `max_model_len` None takes the length that the model was made for, with YaRN the stretched one. `quantization`
    quantises weights, tensor by tensor while they are read, and works on the CPU only; a checkpoint that is quantised
    already (AWQ, GPTQ) is used as it is and takes none. On the CPU, weights are shared with other processes through a
    `weight_store`, unless the checkpoint is quantised already.

    Raises ModelLoadError for a checkpoint that cannot be run, naming the file and the tensor or field. Raises
    ConfigurationError for a `max_model_len` beyond the model's positions, a `quantization` that does not fit the
    checkpoint or the device, or weights that do not fit into a CPU's memory.
    """
    clock = MonotonicClock()
    start = clock.now()
    directory = resolve_model_directory(path)
    checkpoint = open_checkpoint(directory)
    config = _with_the_tokenizers_end(_with_its_own_head(load_model_config(directory), checkpoint), directory)
    compute_dtype = _compute_dtype(dtype, config, checkpoint, device)
    length = _model_len(max_model_len, config)
    weights = _weight_format(config, checkpoint, compute_dtype, device, quantization)
    num_bytes = _checked_bytes(config, attention, weights, checkpoint)
    with place_for(weight_store, config, weights, checkpoint) as place:
        weights = replace(weights, memory=place.memory)
        with refusing_weights_that_do_not_fit(num_bytes, weights, directory):
            model = DecoderForCausalLM(config, attention, max_model_len=length, weights=weights)
            slots = _named_as_stored(model.checkpoint_slots(), checkpoint)
            if place.digests is None:
                place.digests = _fill(slots, checkpoint, progress)
            del slots
            model.pack()
    if weights.prequantized is not None:
        _log_prequantized(model, weights.prequantized)
    if not config.eos_token_ids:
        _logger.warning("%s names no eos_token_id: only stop conditions and max_tokens end a request", directory)
    return LoadedModel(
        model=model,
        config=config,
        dtype=compute_dtype,
        max_model_len=length,
        fingerprint=fingerprint(config, weights, place.digests),
        load_seconds=clock.now() - start,
        checkpoint=checkpoint,
    )


def _with_its_own_head(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Returns the configuration without a tied head if the checkpoint has a head that is not the embedding. It was
    trained then, and `tie_word_embeddings` is wrong; transformers, too, believes the weights."""
    tensors = checkpoint.tensors()
    embedding, head = tensors.get(_EMBEDDING), tensors.get(_HEAD)
    if not config.tie_word_embeddings or embedding is None or head is None or hold_equal_values(embedding, head):
        return config
    _logger.warning(
        "config.json: tie_word_embeddings: true, but lm_head.weight is not model.embed_tokens.weight: using both; set "
        "it to false"
    )
    return replace(config, tie_word_embeddings=False)


def _with_the_tokenizers_end(config: ModelConfig, directory: Path) -> ModelConfig:
    """Returns the configuration with the tokenizer's end token among those that end an output, as in vLLM: the other
    files may still say those of a base model."""
    token = tokenizer_end_token(directory)
    if token is None or token in config.eos_token_ids or not 0 <= token < config.vocab_size:
        return config
    _logger.info(
        "token %d ends an output as well: tokenizer_config.json has it as eos_token, eos_token_id is %s",
        token,
        list(config.eos_token_ids),
    )
    return replace(config, eos_token_ids=(*config.eos_token_ids, token))


def _weight_format(
    config: ModelConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quantization: Quantization
) -> WeightFormat:
    if config.quantization is None:
        weights = WeightFormat(dtype, device, bits_of(quantization))
        if weights.bits is not None and device.type != "cpu":
            raise ConfigurationError(f"quantization {quantization} is for CPUs; use none on {device}")
        return weights
    if quantization != "none":
        raise ConfigurationError(
            f"quantization {quantization}: the checkpoint is quantised already ({config.quantization}); use none, "
            "which runs it as it is, or a checkpoint that is not quantised"
        )
    tensors = PrequantizedTensors(config.quantization, frozenset(checkpoint.tensors()))
    return WeightFormat(dtype, device, prequantized=tensors)


def _log_prequantized(model: DecoderForCausalLM, prequantized: PrequantizedTensors) -> None:
    form = "repacked for the CPU's integer kernels" if model.device.type == "cpu" else "as they are in the checkpoint"
    _logger.info(
        "a quantised checkpoint (%s): %.0f MB of weights in the layers, %s, exactly; computing in %s",
        prequantized.quantization,
        sum(layer.num_bytes for layer in model.linear_layers()) / 1e6,
        form,
        dtype_name(model.dtype),
    )


def fingerprint(config: ModelConfig, weights: WeightFormat, digests: Sequence[bytes]) -> bytes:
    """Returns the SHA-256 of a canonical JSON of all that determines KV: the configuration, the dtype it is computed
    in, the quantisation, and the digests of the weights files, sorted by name.

    The end-of-sequence tokens and the dtype in config.json are left out, since they change no KV.
    """
    fields = asdict(config)
    del fields["eos_token_ids"], fields["dtype"], fields["quantization"]
    fields["rope"]["kind"] = config.rope.kind.value
    content: dict[str, Any] = {
        "version": FINGERPRINT_VERSION,
        "config": fields,
        "dtype": dtype_name(weights.dtype),
        "weights": [digest.hex() for digest in digests],
    }
    if weights.bits is not None:
        content["quantization"] = {"bits": weights.bits, "group_size": GROUP_SIZES[weights.bits]}
    prequantized = config.quantization
    if prequantized is not None:  # the same bytes are other weights under another format
        content["published"] = {
            "format": prequantized.format.value,
            "bits": prequantized.bits,
            "group_size": prequantized.group_size,
            "excluded": prequantized.excluded,
        }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).digest()


def _fill(slots: Mapping[str, Slot], checkpoint: Checkpoint, progress: Progress | None) -> list[bytes]:
    """Reads all weights into `slots` and returns the digests of the files."""
    done, total = 0, checkpoint.num_bytes

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    advance(0)
    return [read_tensors(file, slots, advance) for file in checkpoint.files]


def _compute_dtype(name: DTypeName, config: ModelConfig, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Returns the dtype to compute in. `auto` is the checkpoint's own dtype, that of its configuration if it says one,
    but float32 for float16 on a CPU.

    Only some CPUs compute in float16. float32 represents every float16 value exactly, and choosing it on every CPU lets
    nodes on different machines agree on names of blocks. bfloat16, which would lose bits, is left to the operator.
    """
    if name != "auto":
        return _DTYPES[name]
    stored = dtype_name(_stored_dtype(config, checkpoint))
    own = config.dtype or stored
    if own not in _DTYPES:
        raise ModelLoadError(f"config.json: dtype: {own!r} is not supported; supported are {', '.join(_DTYPES)}")
    if device.type == "cpu" and "float16" in (own, stored) and own != "bfloat16":
        _logger.info(
            "a float16 checkpoint runs in float32 on a CPU; dtype bfloat16 is faster and smaller but rounds them"
        )
        return torch.float32
    if own == "float32" != stored:
        _logger.info(
            "config.json asks for float32, which takes twice the memory of the stored %s: dtype %s takes them as they "
            "are",
            stored,
            stored,
        )
    return _DTYPES[own]


def _stored_dtype(config: ModelConfig, checkpoint: Checkpoint) -> torch.dtype:
    """Returns the dtype of the embedding, a tensor that all families have under the same name."""
    tensors = checkpoint.tensors()
    tensor = tensors.get(_EMBEDDING) or (tensors.get(_HEAD) if config.tie_word_embeddings else None)
    if tensor is None:
        raise _missing(_EMBEDDING, checkpoint, config)
    return _weight_dtype(tensor)


def _model_len(max_model_len: int | None, config: ModelConfig) -> int:
    if max_model_len is None:
        is_yarn = config.rope.kind is RopeKind.YARN  # whose stretched length is the model's own, also for vLLM
        return config.max_context_length if is_yarn else config.max_position_embeddings
    if not 1 <= max_model_len <= config.max_context_length:
        raise ConfigurationError(
            f"max_model_len must be between 1 and {config.max_context_length} for this model, got {max_model_len}"
        )
    return max_model_len


def _checked_bytes(
    config: ModelConfig, attention: AttentionBackend, weights: WeightFormat, checkpoint: Checkpoint
) -> int:
    """Returns the bytes that the weights take on a CPU. Raises ModelLoadError unless the checkpoint's tensors are those
    of the model. Takes no memory: sizes may be wrong and beyond any machine."""
    memory = CountedMemory()
    device = weights.device if weights.device.type == "cpu" else torch.device("meta")
    planned = replace(weights, device=device, memory=memory)
    model = DecoderForCausalLM(config, attention, max_model_len=1, weights=planned)
    slots = _named_as_stored(model.checkpoint_slots(), checkpoint)
    _check_tensors(slots, checkpoint, config)
    return weight_bytes(memory, slots)


def _named_as_stored(slots: dict[str, Slot], checkpoint: Checkpoint) -> dict[str, Slot]:
    """Returns the slots by the names that their tensors have in the checkpoint: some have an embedding that is tied to
    the head only under the name of the head."""
    stored = checkpoint.tensors()
    if _HEAD not in slots and _HEAD in stored and _EMBEDDING not in stored:
        slots[_HEAD] = slots.pop(_EMBEDDING)
    return slots


def _check_tensors(slots: Mapping[str, Slot], checkpoint: Checkpoint, config: ModelConfig) -> None:
    stored = checkpoint.tensors()
    for name, slot in slots.items():
        tensor = stored.get(name)
        if tensor is None:
            raise _missing(name, checkpoint, config)
        if slot.integers:
            _check_integers(tensor)
        else:
            _weight_dtype(tensor)
        if tensor.shape != slot.shape:
            raise ModelLoadError(
                f"tensor {name} in {tensor.file} has shape {list(tensor.shape)}, not {list(slot.shape)}"
            )
    # Expected although the model does not read them here: a tied head that is stored once more, the rotary frequencies
    # of old Llama files, and the scales of an FP8 KV cache.
    expected = {_HEAD} if config.tie_word_embeddings else set()
    extra = [
        name
        for name in stored
        if name not in slots
        and name not in expected
        and not name.endswith("rotary_emb.inv_freq")
        and not is_kv_scale(name)
    ]
    if extra:
        shown = ", ".join(extra[:5]) + (", ..." if len(extra) > 5 else "")
        _logger.warning(
            "%d tensors of %s are not part of the model and were ignored: %s", len(extra), _names(checkpoint), shown
        )


def _missing(name: str, checkpoint: Checkpoint, config: ModelConfig) -> ModelLoadError:
    """Returns the error about a tensor that is missing, with what is there in its place."""
    stored = checkpoint.tensors()
    missing = f"tensor {name} is missing from {_names(checkpoint)}"
    codes, bare = f"{name.removesuffix('weight')}qweight", name.removeprefix("model.")
    if config.quantization is None and codes in stored:
        return ModelLoadError(
            f"{missing}, which has {codes}: the weights are quantised, but config.json lacks quantization_config; put "
            "there what quantize_config.json (GPTQ) or quant_config.json (AWQ) says, with a quant_method of gptq or awq"
        )
    if bare != name and bare in stored:
        return ModelLoadError(
            f"{missing}, which has {bare}: its names lack the prefix `model.` of a model with its head; save it by "
            "transformers' AutoModelForCausalLM"
        )
    return ModelLoadError(missing)


def _check_integers(tensor: StoredTensor) -> None:
    if tensor.dtype != INTEGER_DTYPE:
        raise ModelLoadError(
            f"tensor {tensor.name} in {tensor.file} has dtype {tensor.dtype}; packed codes must have {INTEGER_DTYPE}"
        )


def _weight_dtype(tensor: StoredTensor) -> torch.dtype:
    if tensor.dtype not in WEIGHT_DTYPES:
        supported = ", ".join(WEIGHT_DTYPES)
        raise ModelLoadError(
            f"tensor {tensor.name} in {tensor.file} has dtype {tensor.dtype}; supported are {supported}"
        )
    return WEIGHT_DTYPES[tensor.dtype]


def _names(checkpoint: Checkpoint) -> str:
    paths: list[Path] = [file.path for file in checkpoint.files]
    return str(paths[0]) if len(paths) == 1 else f"all {len(paths)} weights files of {paths[0].parent}"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name that configurations, fingerprints and layouts have for a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
