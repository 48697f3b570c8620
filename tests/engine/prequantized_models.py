"""Tiny models as AWQ and GPTQ publish them, each with its dequantised float32 model beside it.

Codes, zeros and scales are random; every other tensor is that of the family's random model.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from paged_kernels.prequantized_weight import PrequantizedFormat
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.tiny_models import FAMILIES, save_random
from tests.kernels.prequantized import Layer, random_layer

WEIGHTS = "model.safetensors"
_SPREAD = 0.2


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to quantise a checkpoint. `order` returns the seed for a module's order of groups, if they are
    scattered."""

    fields: Mapping[str, Any]
    format: PrequantizedFormat
    group_size: int
    bits: int = 4
    order: Callable[[str], int] | None = None
    stores_zeros: bool = True


def _awq(group_size: int, *, zero_point: bool = True) -> Recipe:
    fields = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": zero_point, "version": "GEMM"}
    return Recipe(fields, PrequantizedFormat.AWQ, group_size, stores_zeros=zero_point)


def _gptq(
    group_size: int, *, version: str = "gptq", bits: int = 4, order: Callable[[str], int] | None = None
) -> Recipe:
    fields = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": order is not None}
    fields |= {"sym": False, "checkpoint_format": version}
    return Recipe(fields, PrequantizedFormat(version), group_size, bits, order)


def _by_inputs(module: str) -> int:
    """Returns the same seed for modules with the same inputs, as GPTQ gives them the same order."""
    return {"q": 1, "k": 1, "v": 1, "o": 2, "g": 3, "u": 3, "d": 4}[module.rsplit(".", 1)[1][0]]


def _each_its_own(module: str) -> int:
    return sum(module.encode())


RECIPES: Mapping[str, Recipe] = {
    "awq-32": _awq(32),
    "awq-64": _awq(64),
    "awq-all": _awq(-1),
    "awq-no-zeros": _awq(64, zero_point=False),
    "gptq-64": _gptq(64),
    "gptq-all": _gptq(-1),
    "gptq-32-order": _gptq(32, order=_by_inputs),
    "gptq-32-orders": _gptq(32, order=_each_its_own),
    "gptq_v2-64": _gptq(64, version="gptq_v2"),
    "gptq-64-8-bits": _gptq(64, bits=8),
    "gptq_v2-32-8-bits-order": _gptq(32, version="gptq_v2", bits=8, order=_by_inputs),
}


@dataclass(frozen=True, slots=True)
class PrequantizedModel:
    """A quantised checkpoint. `meant` is a directory with the same model dequantised, in float32; `layers` are by the
    name of their module."""

    directory: Path
    meant: Path
    layers: Mapping[str, Layer]


def make_prequantized_model(
    family: str,
    recipe: str,
    directory: Path,
    *,
    leave: tuple[str, ...] = (),
    quantize_head: bool = False,
    **fields: Any,
) -> PrequantizedModel:
    """Writes a quantised checkpoint. Modules whose names end with one of `leave` stay as they are. `fields` go into the
    `quantization_config`."""
    config = FAMILIES[family]()
    config.vocab_size = 320
    config.intermediate_size = 192  # a multiple of the group sizes
    meant = save_random(config, directory / "meant")
    chosen = RECIPES[recipe]
    tensors, layers = load_file(meant / WEIGHTS), dict[str, Layer]()
    stored_tensors = dict[str, Tensor]()
    for name, tensor in sorted(tensors.items()):
        module = name.removesuffix(".weight")
        is_matrix = name.endswith("_proj.weight") or (quantize_head and name == "lm_head.weight")
        if not is_matrix or module.endswith(leave or "-"):
            stored_tensors[name] = tensor
            continue
        layer = _draw(chosen, module, tensor)
        layers[module] = layer
        tensors[name] = layer.dequantized()
        stored_tensors |= {f"{module}.{kind}": stored for kind, stored in _stored(chosen, layer).items()}
    save_file(tensors, meant / WEIGHTS, metadata={"format": "pt"})
    target = directory / "prequantized"
    target.mkdir()
    stored_config = json.loads((meant / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps(stored_config | {"quantization_config": {**chosen.fields, **fields}})
    )
    save_file(stored_tensors, target / WEIGHTS, metadata={"format": "pt"})
    return PrequantizedModel(target, meant, layers)


def _draw(recipe: Recipe, module: str, like: Tensor) -> Layer:
    num_outputs, num_inputs = like.shape
    return random_layer(
        recipe.format,
        num_inputs,
        num_outputs,
        num_inputs if recipe.group_size == -1 else recipe.group_size,
        bits=recipe.bits,
        symmetric=not recipe.stores_zeros,
        order_seed=None if recipe.order is None else recipe.order(module),
        seed=sum(module.encode()),
        spread=_SPREAD,
    )


def _stored(recipe: Recipe, layer: Layer) -> dict[str, Tensor]:
    tensors = layer.tensors()
    if not recipe.stores_zeros:
        del tensors["qzeros"]
    if recipe.format is not PrequantizedFormat.AWQ:
        tensors["g_idx"] = layer.group_index()
    return tensors


def split_in_shards(directory: Path, *, num_shards: int) -> None:
    """Splits the weights file into several, so that the tensors of a layer are in different ones."""
    tensors = load_file(directory / WEIGHTS)
    (directory / WEIGHTS).unlink()
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        names = sorted(tensors)[shard::num_shards]
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def edit_tensors(directory: Path, changes: Mapping[str, Tensor | None]) -> None:
    """Sets tensors of the weights file; None removes one."""
    changed = {**load_file(directory / WEIGHTS), **changes}
    kept = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(kept, directory / WEIGHTS, metadata={"format": "pt"})


def zeros_of(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)
