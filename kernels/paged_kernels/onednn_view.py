"""oneDNN's opaque tensors over memory of ours. torch makes them with memory of their own only, except through the C
interface that its compiled models (AOTInductor) use, which is kept stable for them.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

_LIBRARY = "libtorch_cpu.so"
_LAYOUT_MKLDNN = 3  # c10::Layout::Mkldnn
_DTYPE_BFLOAT16 = 15  # c10::ScalarType::BFloat16
_DEVICE_CPU = 0


def opaque_view(memory: Tensor, shape: Sequence[int], metadata: Tensor) -> Tensor | None:
    """A bfloat16 tensor of `shape` that reads `memory` in the order that oneDNN's serialised `metadata` says. It does
    not keep `memory` alive. None from a torch that can not do it.
    """
    try:
        create = _library().aoti_torch_create_tensor_from_blob_v2
        make = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
    except (OSError, AttributeError):
        return None
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    strides = (ctypes.c_int64 * len(shape))(*torch.empty(shape, device="meta").stride())
    handle = ctypes.c_void_p()
    status: int = create(
        ctypes.c_void_p(memory.data_ptr()),
        ctypes.c_int64(len(shape)),
        sizes,
        strides,
        ctypes.c_int64(0),
        ctypes.c_int32(_DTYPE_BFLOAT16),
        ctypes.c_int32(_DEVICE_CPU),
        ctypes.c_int32(0),
        ctypes.byref(handle),
        ctypes.c_int32(_LAYOUT_MKLDNN),
        ctypes.c_void_p(metadata.data_ptr()),
        ctypes.c_int64(metadata.numel()),
    )
    if status != 0:
        return None
    view: Tensor = make(_capsule(handle))  # type: ignore[arg-type]  # it takes a capsule, whatever its annotation says
    return view


def _capsule(handle: ctypes.c_void_p) -> object:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    capsule: object = make(handle, None, None)
    return capsule


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY))  # loaded already
