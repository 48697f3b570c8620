"""Loads a model for the CPU, quantised or not."""

from pathlib import Path

from paged_kernels.registry import select_backend

from kvrelay.core.config.option_types import DTypeName, Quantization
from kvrelay.core.process.weight_store import WeightStore
from kvrelay.engine.loading.loader import LoadedModel, load_model


def load(
    directory: Path,
    quantization: Quantization = "none",
    *,
    dtype: DTypeName = "float32",
    weight_store: WeightStore | None = None,
) -> LoadedModel:
    return load_model(
        str(directory),
        dtype=dtype,
        attention=select_backend("auto"),
        max_model_len=None,
        quantization=quantization,
        weight_store=weight_store,
    )
