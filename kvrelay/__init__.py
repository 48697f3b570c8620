"""kvrelay: disaggregated prefill/decode serving for large language models.

`from kvrelay import LLM, SamplingParams` is the engine in one's own process. It is imported when it is asked for: the
router imports this package too, and has no torch.
"""

from typing import TYPE_CHECKING

from kvrelay.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvrelay.offline.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "LLM":
        try:
            from kvrelay.offline.llm import LLM
        except ModuleNotFoundError as error:
            raise ImportError(f"LLM needs {error.name}: pip install 'kvrelay[engine]'") from error
        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
