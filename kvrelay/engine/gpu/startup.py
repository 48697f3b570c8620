"""The part of start-up that needs Triton and a GPU: profiles a step, sizes the pool, records steps.

It is imported only if the engine runs on a GPU.
"""

import logging
import time

from torch import Tensor

from kvrelay.core.kv.layout import KVLayout
from kvrelay.engine.gpu.memory_profile import DEFAULT_UTILIZATION, blocks_that_fit, profile_memory
from kvrelay.engine.gpu.runner import GpuRunner, StepLimits
from kvrelay.engine.gpu.sampler import GpuSampler
from kvrelay.engine.gpu.step_graphs import CudaGraphRecorder
from kvrelay.engine.loading.loader import LoadedModel
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.out_of_memory import out_of_memory_as_configuration_error
from kvrelay.engine.pool_size import PoolSize, fit_length
from kvrelay.engine.runner import Runner

_logger = logging.getLogger(__name__)


def size_gpu_pool(options: EngineOptions, loaded: LoadedModel, layout: KVLayout) -> PoolSize:
    """Returns the size of the pool, after running the largest step to measure its memory. Raises ConfigurationError if
    too little of the GPU's memory is left, ModelLoadError if the model's results are not finite."""
    _logger.info("profiling a step of %d tokens", options.max_num_batched_tokens)
    start = time.monotonic()
    with out_of_memory_as_configuration_error(
        f"after the weights, the GPU has no memory for a step of {options.max_num_batched_tokens} tokens: end what "
        "else uses it, or lower max_num_batched_tokens or max_num_seqs"
    ):
        profile = profile_memory(
            loaded.model,
            GpuSampler(loaded.config.eos_token_ids),
            layout,
            _limits(options, loaded.max_model_len),
            graphs=_records(options),
        )
    _logger.info("profiled in %.1f s", time.monotonic() - start)
    utilization = options.gpu_memory_utilization or DEFAULT_UTILIZATION / options.nodes_per_device
    num_blocks = blocks_that_fit(profile, layout, utilization=utilization, num_blocks=options.num_blocks)
    return fit_length(options, layout, num_blocks, max_model_len=loaded.max_model_len)


def gpu_runner(options: EngineOptions, loaded: LoadedModel, kv_pool: Tensor, max_model_len: int) -> Runner:
    """Returns the runner, after recording steps unless the options say not to. Raises ConfigurationError if
    there is no memory for them."""
    start = time.monotonic()
    recorder = CudaGraphRecorder() if _records(options) else None
    sampler = GpuSampler(loaded.config.eos_token_ids)
    with out_of_memory_as_configuration_error(
        "the GPU has no memory left for recorded steps: lower gpu_memory_utilization or max_num_seqs, or set "
        "enforce_eager, which records none"
    ):
        runner = GpuRunner(loaded.model, sampler, kv_pool, _limits(options, max_model_len), recorder)
    if recorder is not None:
        _logger.info("recorded steps in %.1f s", time.monotonic() - start)
    return runner


def _records(options: EngineOptions) -> bool:
    """Tells whether steps are recorded. With the reference attention they cannot be: it reads sizes of the batch
    from the GPU."""
    return not options.enforce_eager and options.attention_backend != "reference"


def _limits(options: EngineOptions, max_model_len: int) -> StepLimits:
    return StepLimits(options.max_num_seqs, options.max_num_batched_tokens, max_model_len)
