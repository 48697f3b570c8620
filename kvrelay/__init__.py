"""kvrelay: disaggregated prefill/decode serving for large language models.

`from kvrelay import LLM, SamplingParams` is the engine in one's own process. Everything is imported when it is asked
for: every process imports this package first, the router has no torch, and no command should need a moment in which
Ctrl-C would find nobody to catch it.
"""

import importlib
from typing import TYPE_CHECKING

from kvrelay.core.process.extras import ENGINE_MODULES

if TYPE_CHECKING:
    from kvrelay.core.errors import ConfigurationError, InvalidRequestError, KVRelayError, ModelLoadError
    from kvrelay.core.generation.outputs import TokenLogprobs
    from kvrelay.core.generation.sampling_params import SamplingParams
    from kvrelay.offline.llm import LLM
    from kvrelay.offline.request_output import BatchError, CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BatchError",
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

_MODULES = {
    "LLM": "kvrelay.offline.llm",
    "BatchError": "kvrelay.offline.request_output",
    "CompletionOutput": "kvrelay.offline.request_output",
    "ConfigurationError": "kvrelay.core.errors",
    "InvalidRequestError": "kvrelay.core.errors",
    "KVRelayError": "kvrelay.core.errors",
    "ModelLoadError": "kvrelay.core.errors",
    "RequestOutput": "kvrelay.offline.request_output",
    "SamplingParams": "kvrelay.core.generation.sampling_params",
    "TokenLogprobs": "kvrelay.core.generation.outputs",
}


def _imported(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found: object = getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ENGINE_MODULES:
            raise  # a broken package, or a file of the caller that has the name of one
        raise ImportError(f"{name} needs {error.name}: pip install 'kvrelay[engine]'") from error
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # with it, type checkers would believe that every name exists
    __getattr__ = _imported
