"""Finds the compiled extension, once: None where it was not built."""

import functools
import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from paged_kernels import _native

    class Extension:
        """The module `_native` as a type: the functions of it whose callers can do without, as its stub declares them.
        What cannot do without imports the module itself."""

        ThreadLimit = _native.ThreadLimit
        available_instruction_sets = staticmethod(_native.available_instruction_sets)
        rms_norm = staticmethod(_native.rms_norm)
        add_rms_norm = staticmethod(_native.add_rms_norm)
        silu_mul = staticmethod(_native.silu_mul)
        rotary = staticmethod(_native.rotary)
        pack_rows = staticmethod(_native.pack_rows)
        quantized_matmul = staticmethod(_native.quantized_matmul)
        dequantize = staticmethod(_native.dequantize)
        fill_panels = staticmethod(_native.fill_panels)
        take_rows = staticmethod(_native.take_rows)
        packed_matmul = staticmethod(_native.packed_matmul)
        sample_tokens = staticmethod(_native.sample_tokens)
        token_logprobs = staticmethod(_native.token_logprobs)
        prefer_huge_pages = staticmethod(_native.prefer_huge_pages)
        take_huge_pages = staticmethod(_native.take_huge_pages)
        map_file = staticmethod(_native.map_file)
        can_copy_rows = staticmethod(_native.can_copy_rows)
        copy_rows = staticmethod(_native.copy_rows)


@functools.cache
def load_extension() -> "Extension | None":
    """Returns `paged_kernels._native`, or None where it was not built."""
    try:
        return cast("Extension", importlib.import_module("paged_kernels._native"))
    except ModuleNotFoundError:
        return None
