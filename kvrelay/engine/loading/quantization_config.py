"""Reads a checkpoint's `quantization_config`: AWQ and GPTQ, as AutoAWQ, AutoGPTQ and GPTQModel write it.

Invariant: a `CheckpointQuantization` that exists describes a packing that we read exactly. Everything else raises
ModelLoadError, which names the field.
"""

from pathlib import Path
from typing import Any

from paged_kernels.cpu.quantized_weight import Bits
from paged_kernels.prequantized_weight import PrequantizedFormat

from kvrelay.core.errors import ModelLoadError
from kvrelay.engine.layers.weight_format import CheckpointQuantization

SUPPORTED = "awq (4 bits, version gemm) and gptq (4 or 8 bits, checkpoint_format gptq or gptq_v2)"
GROUP_MULTIPLE = 32


def parse_quantization(raw: Any, path: Path) -> CheckpointQuantization | None:
    """Returns the quantisation of the weights, or None if they are plain. `raw` is the field `quantization_config` of
    the configuration at `path`. Raises ModelLoadError."""
    if raw is None or _quantizes_only_kv(raw):
        return None
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path}: quantization_config must be an object, not a {type(raw).__name__}")
    match raw.get("quant_method"):
        case "awq":
            return _awq(raw, path)
        case "gptq":
            return _gptq(raw, path)
        case method:
            raise _unsupported("quant_method", method, path)


def _quantizes_only_kv(raw: Any) -> bool:
    """Tells whether this is about nothing but a static FP8 KV cache, so that the weights are plain."""
    if not isinstance(raw, dict) or raw.get("config_groups"):
        return False
    scheme = raw.get("kv_cache_scheme")
    return (
        raw.get("quant_method") == "compressed-tensors"
        and isinstance(scheme, dict)
        and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
        and not scheme.get("dynamic")
    )


def _awq(raw: dict[str, Any], path: Path) -> CheckpointQuantization:
    field, version = _either(raw, "version", "format", default="gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _unsupported(field, version, path)
    if raw.get("backend") == "llm-awq":
        raise _unsupported("backend", "llm-awq", path)
    return CheckpointQuantization(
        format=PrequantizedFormat.AWQ,
        bits=_bits(raw, (4,), path),
        group_size=_group_size(raw, path),
        zeros=_flag(raw, "zero_point", True, path),
        group_index=False,
        excluded=_excluded(raw, path),
    )


def _gptq(raw: dict[str, Any], path: Path) -> CheckpointQuantization:
    formats = {form.value: form for form in (PrequantizedFormat.GPTQ, PrequantizedFormat.GPTQ_V2)}
    field, stored = _either(raw, "checkpoint_format", "format", default="gptq")
    if not isinstance(stored, str) or stored not in formats:
        raise _unsupported(field, stored, path)
    if raw.get("is_marlin_format"):
        raise _unsupported("checkpoint_format", "marlin", path)
    if raw.get("pack_dtype", "int32") != "int32":
        raise _unsupported("pack_dtype", raw["pack_dtype"], path)
    _check_rules(raw.get("dynamic"), path)
    bits = _bits(raw, (4, 8), path)
    _flag(raw, "sym", True, path)  # checked only: zeros are stored either way
    return CheckpointQuantization(
        format=formats[stored],
        bits=bits,
        group_size=_group_size(raw, path),
        zeros=True,
        group_index=_flag(raw, "desc_act", False, path),
        excluded=_excluded(raw, path),
    )


def _either(raw: dict[str, Any], older: str, newer: str, *, default: str) -> tuple[str, Any]:
    """Returns the name and the value of a field that has two names. As in transformers, the older one has priority."""
    given = [(field, raw[field]) for field in (older, newer) if raw.get(field) is not None]
    return given[0] if given else (older, default)


def _check_rules(rules: Any, path: Path) -> None:
    """Raises ModelLoadError for rules of GPTQModel that quantise some layers differently. Rules that begin with `-:`
    only exclude layers, which is visible from the tensors."""
    if rules and not (isinstance(rules, dict) and all(str(rule).startswith("-:") for rule in rules)):
        raise _unsupported("dynamic", rules, path)


def _bits(raw: dict[str, Any], supported: tuple[Bits, ...], path: Path) -> Bits:
    value = raw.get("bits", raw.get("w_bit"))
    for bits in supported:
        if value == bits and not isinstance(value, bool):
            return bits
    raise _unsupported("bits", value, path)


def _group_size(raw: dict[str, Any], path: Path) -> int | None:
    value = raw.get("group_size", raw.get("q_group_size"))
    if value == -1:
        return None
    if not isinstance(value, int) or value < 1 or value % GROUP_MULTIPLE:
        raise ModelLoadError(
            f"{path}: quantization_config.group_size: {value!r} must be -1 or a multiple of {GROUP_MULTIPLE}"
        )
    return value


def _flag(raw: dict[str, Any], field: str, default: bool, path: Path) -> bool:
    value = raw.get(field, default)
    if not isinstance(value, bool):
        raise ModelLoadError(f"{path}: quantization_config.{field}: {value!r} must be true or false")
    return value


def _excluded(raw: dict[str, Any], path: Path) -> tuple[str, ...]:
    names = raw.get("modules_to_not_convert") or []
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ModelLoadError(f"{path}: quantization_config.modules_to_not_convert: {names!r} must be a list of names")
    return tuple(names)


def _unsupported(field: str, value: Any, path: Path) -> ModelLoadError:
    return ModelLoadError(f"{path}: quantization_config.{field}: {value!r} is not supported; supported are {SUPPORTED}")
