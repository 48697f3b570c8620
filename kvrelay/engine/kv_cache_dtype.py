"""The dtype of the KV pool: the model's own, or FP8 with scales that are the same on every node.

Invariant: engines whose scales differ in any bit have different layouts, so that neither takes a block of the other.
"""

import hashlib
import logging

import torch
from paged_kernels.kv_scales import FP8, KVScales

from kvrelay.core.config.option_types import KVCacheDType
from kvrelay.core.kv.layout import KVLayout
from kvrelay.engine.loading.calculated_kv_scales import calculate_kv_scales
from kvrelay.engine.loading.loader import LoadedModel, dtype_name
from kvrelay.engine.loading.stored_kv_scales import stored_kv_scales

_logger = logging.getLogger(__name__)


def choose_kv_scales(loaded: LoadedModel, kv_cache_dtype: KVCacheDType, *, calculate: bool) -> KVScales | None:
    """Returns the scales of an FP8 pool on the model's device, or None if the pool has the model's dtype.

    They are the checkpoint's scales if it has any, otherwise calculated ones with `calculate`, otherwise all 1. Raises
    ModelLoadError for unusable scales."""
    if kv_cache_dtype == "auto":
        return None
    scales = stored_kv_scales(loaded.checkpoint, loaded.config)
    if scales is not None:
        _logger.info("FP8 KV cache with the checkpoint's scales%s", "; none are calculated" if calculate else "")
    elif calculate:
        scales = calculate_kv_scales(loaded.checkpoint, loaded.config)
        _logger.info("FP8 KV cache with scales calculated from the weights")
    else:
        _logger.warning(
            "FP8 KV cache with scales of 1: the checkpoint has none. K and V above 448 are cut off; "
            "calculate_kv_scales finds scales that fit the model"
        )
        ones = torch.ones(loaded.config.num_layers, loaded.config.num_kv_heads, dtype=torch.float32)
        scales = KVScales(ones, ones)
    return KVScales(scales.key.to(loaded.model.device), scales.value.to(loaded.model.device))


def kv_layout(loaded: LoadedModel, block_size: int, kv_scales: KVScales | None) -> KVLayout:
    """Returns the layout of a pool for this model, which is FP8 if there are scales."""
    dtype = loaded.dtype if kv_scales is None else FP8
    return KVLayout(
        num_kv_heads=loaded.config.num_kv_heads,
        num_layers=loaded.config.num_layers,
        block_size=block_size,
        head_dim=loaded.config.head_dim,
        dtype=dtype_name(dtype),
        scales_digest="" if kv_scales is None else scales_digest(kv_scales),
    )


def scales_digest(kv_scales: KVScales) -> str:
    """Returns 32 hex digits, the first half of a SHA-256 over the scales as little-endian float32: those of K by layer
    and head, then those of V."""
    digest = hashlib.sha256()
    for scales in (kv_scales.key, kv_scales.value):
        digest.update(scales.cpu().contiguous().numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:32]
