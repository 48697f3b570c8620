"""Chooses the attention backend by name. Backends are imported only when chosen."""

import logging
from typing import Literal

from paged_kernels.base import AttentionBackend
from paged_kernels.extension import load_extension

logger = logging.getLogger(__name__)

BackendName = Literal["auto", "native", "reference"]

_REMEDY = "install a C++17 compiler (for example the packages g++ or clang) and reinstall kvrelay"


class BackendUnavailableError(RuntimeError):
    """The attention backend that was asked for was not built; the message says what to do."""


def select_backend(name: BackendName) -> AttentionBackend:
    """A backend by name. `auto` takes the compiled kernels where they were built, else, with a warning, plain torch.

    Raises BackendUnavailableError when `native` is asked for and was not built, ValueError for an unknown name.
    """
    if name == "native" and load_extension() is None:
        raise BackendUnavailableError(f"the compiled attention kernels (paged_kernels._native) are missing: {_REMEDY}")
    if name == "auto" and load_extension() is None:
        logger.warning(
            "The compiled attention kernels (paged_kernels._native) are missing and plain torch is used instead: "
            "attention in decoding is 5 to 30 times slower. To fix it, %s.",
            _REMEDY,
        )
        name = "reference"
    match name:
        case "auto" | "native":
            from paged_kernels.native import NativeBackend

            return NativeBackend()
        case "reference":
            from paged_kernels.reference import ReferenceBackend

            return ReferenceBackend()
        case _:
            raise ValueError(f"unknown attention backend {name!r}: use auto, native or reference")
