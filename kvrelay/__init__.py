"""kvrelay: disaggregated prefill/decode serving for large language models.

`from kvrelay import LLM, SamplingParams` is the engine in one's own process. `LLM` and its results are imported when
they are asked for: the router imports this package too, and has no torch.
"""

import importlib
from typing import TYPE_CHECKING

from kvrelay.core.errors import ConfigurationError, InvalidRequestError, KVRelayError, ModelLoadError
from kvrelay.core.extras import ENGINE_MODULES
from kvrelay.core.outputs import TokenLogprobs
from kvrelay.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvrelay.offline.llm import LLM
    from kvrelay.offline.request_output import CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigurationError",
    "InvalidRequestError",
    "KVRelayError",
    "ModelLoadError",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in ("LLM", "CompletionOutput", "RequestOutput"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "kvrelay.offline.llm" if name == "LLM" else "kvrelay.offline.request_output"
    try:
        found: object = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name not in ENGINE_MODULES:
            raise  # a broken package, or a file of the caller that has the name of one
        raise ImportError(f"{name} needs {error.name}: pip install 'kvrelay[engine]'") from error
    return found
