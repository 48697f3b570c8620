"""From options to an engine: loads the model, sizes the pool, joins runner, pool and scheduler, and logs each step.

It takes two calls, because the caller makes the pool: `prepare_engine` says how large it must be, and
`PreparedEngine.build` takes it.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from paged_kernels.base import AttentionBackend
from paged_kernels.cpu.packed import can_pack
from paged_kernels.cpu.threads import num_threads, threads_kept, use_threads
from paged_kernels.kv_scales import KVScales
from paged_kernels.registry import BackendUnavailableError, select_backend
from torch import Tensor

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.model.directory import resolve_model_directory
from kvrelay.core.process.cgroup import available_cores, free_memory
from kvrelay.core.process.core_table import CoreShare
from kvrelay.core.process.weight_store import WeightStore
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.cpu.runner import CpuRunner
from kvrelay.engine.cpu.step_threads import StepThreads
from kvrelay.engine.device import choose_device, look_at_machine
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv_cache_dtype import choose_kv_scales, kv_layout
from kvrelay.engine.loading.loader import LoadedModel, load_model
from kvrelay.engine.models.model_config import load_model_config
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.out_of_memory import out_of_memory_as_configuration_error
from kvrelay.engine.pool_size import PoolSize, size_pool
from kvrelay.engine.runner import Runner
from kvrelay.engine.sampling.sampler import Sampler
from kvrelay.engine.scheduler import SchedulerConfig

_logger = logging.getLogger(__name__)
_PROGRESS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PreparedEngine:
    """An engine that lacks only the memory of its pool. `attention` is the name of the backend."""

    options: EngineOptions
    loaded: LoadedModel
    layout: KVLayout
    size: PoolSize
    attention: str

    @property
    def device(self) -> torch.device:
        """Returns the device on which the pool must be."""
        return self.loaded.model.device

    @property
    def namespace(self) -> KVNamespace:
        return KVNamespace(
            model_fingerprint=self.loaded.fingerprint,
            kv_dtype=self.layout.dtype,
            layout_id=self.layout.layout_id,
            block_size=self.layout.block_size,
        )

    def build(
        self,
        kv_pool: Tensor,
        *,
        retract: Callable[[Sequence[int]], None],
        publish: bool,
        publish_hits: bool = False,
        core_share: CoreShare | None = None,
    ) -> Engine:
        """Returns the engine. `kv_pool` is zeroed, `[size.num_blocks, *layout.block_shape]` of the layout's dtype, on
        the model's device. `retract` is that of `BlockPool`, `publish` and `publish_hits` are those of `Engine`.

        `core_share` is for an engine that computes on the CPU. Without it, the engine has as many cores as the option
        `threads` says, or `default_threads`. On a GPU this also records steps, which takes seconds, and raises
        ConfigurationError if there is no memory for them."""
        assert kv_pool.shape == (self.size.num_blocks, *self.layout.block_shape) and kv_pool.device == self.device
        eos_token_ids = self.loaded.config.eos_token_ids
        on_cpu = self.device.type == "cpu"
        torch_multiplies = not can_pack(self.loaded.dtype, self.device)
        share = core_share or CoreShare(self.options.threads or default_threads())
        threads = StepThreads(share if on_cpu else None, torch_multiplies=torch_multiplies)
        config = SchedulerConfig(
            block_size=self.layout.block_size,
            max_num_seqs=self.options.max_num_seqs,
            max_num_batched_tokens=self.options.max_num_batched_tokens,
            max_num_mixed_tokens=self.options.max_num_mixed_tokens,
            max_model_len=self.size.max_model_len,
            policy=self.options.scheduling_policy,
        )
        return Engine(
            config,
            self._runner(kv_pool, threads),
            BlockPool(self.size.num_blocks, retract=retract),
            self.namespace,
            eos_token_ids=eos_token_ids,
            publish=publish,
            publish_hits=publish_hits,
            run_ahead=not on_cpu,
            threads=threads,
        )

    def _runner(self, kv_pool: Tensor, threads: StepThreads) -> Runner:
        if self.device.type != "cpu":
            # Not above: it imports Triton, which need not be installed where there is no GPU.
            from kvrelay.engine.gpu.startup import gpu_runner

            return gpu_runner(self.options, self.loaded, kv_pool, self.size.max_model_len)
        config = self.loaded.config
        return CpuRunner(self.loaded.model, Sampler(config.eos_token_ids), kv_pool, threads)


def default_threads() -> int:
    """Returns how many threads an engine uses whose options leave it open: as many as the calling thread has, which by
    default torch chooses, but no more than there are cores for this process. Torch knows nothing of quotas."""
    return min(num_threads(), available_cores())


def planned_device(options: EngineOptions) -> torch.device:
    """Returns the device for an engine of these options, and logs why it is that one. Raises ConfigurationError if the
    device that they ask for cannot be used."""
    device, reason = choose_device(options.device, look_at_machine, cpu_only=_cpu_only(options))
    _logger.info("device %s (asked for: %s): %s", device, options.device, reason)
    return device


def prepare_engine(options: EngineOptions, device: torch.device | None = None) -> PreparedEngine:
    """Loads the model on as many threads as the options say, or `default_threads`, and sizes the pool. `device` is the
    `planned_device` of these options; None chooses it now. Raises ModelLoadError or ConfigurationError."""
    with threads_kept():
        use_threads(options.threads or default_threads(), torch_multiplies=True)
        return _prepare(options, planned_device(options) if device is None else device)


def _prepare(options: EngineOptions, device: torch.device) -> PreparedEngine:
    options = options.sized_for(device)
    attention = _attention(options, device, _head_dim(options, device))
    _logger.info("loading %s", options.model)
    loaded = _load(options, device, attention)
    quantized = "" if options.quantization == "none" else f", weights as {options.quantization}"
    _logger.info("loaded in %.1f s as %s%s", loaded.load_seconds, loaded.dtype, quantized)
    kv_scales = choose_kv_scales(loaded, options.kv_cache_dtype, calculate=options.calculate_kv_scales)
    if kv_scales is not None:
        attention = _attention(options, device, loaded.config.head_dim, kv_scales)
        loaded.model.attend_with(attention)
    layout = kv_layout(loaded, options.block_size, kv_scales)
    if device.type == "cpu":
        size = size_pool(options, layout, max_model_len=loaded.max_model_len, free_bytes=free_memory())
    else:
        from kvrelay.engine.gpu.startup import size_gpu_pool

        size = size_gpu_pool(options, loaded, layout)
    loaded.model.rotary.keep(size.max_model_len)
    return PreparedEngine(options, loaded, layout, size, attention.name)


def _load(options: EngineOptions, device: torch.device, attention: AttentionBackend) -> LoadedModel:
    with out_of_memory_as_configuration_error(
        f"the weights of {options.model} do not fit on {device}: end what else uses the GPU, or take a smaller or a "
        "quantised (AWQ, GPTQ) model"
    ):
        return load_model(
            options.model,
            dtype=options.dtype,
            attention=attention,
            max_model_len=options.max_model_len or None,
            quantization=options.quantization,
            device=device,
            weight_store=None if options.weight_store is None else WeightStore(options.weight_store),
            progress=_progress_logger(),
        )


def _cpu_only(options: EngineOptions) -> str:
    """Returns the name and value of a given option that works only on a CPU, or an empty string."""
    if options.quantization != "none":
        return f"quantization {options.quantization}"
    return "attention_backend native" if options.attention_backend == "native" else ""


def _head_dim(options: EngineOptions, device: torch.device) -> int | None:
    """Returns what a choice of kernels on the CPU depends on, before the weights are read, which takes long."""
    return load_model_config(resolve_model_directory(options.model)).head_dim if device.type == "cpu" else None


def _attention(
    options: EngineOptions, device: torch.device, head_dim: int | None, kv_scales: KVScales | None = None
) -> AttentionBackend:
    try:
        return select_backend(options.attention_backend, device, kv_scales=kv_scales, head_dim=head_dim)
    except BackendUnavailableError as error:
        raise ConfigurationError(f"attention_backend {options.attention_backend}: {error}") from error


def _progress_logger() -> Callable[[int, int], None]:
    """Returns a callback that logs how far loading is, about once a second."""
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _PROGRESS_SECONDS:
            last = now
            _logger.info("loaded %.1f of %.1f GB (%d%%)", done / 1e9, total / 1e9, 100 * done // max(1, total))

    return progress
