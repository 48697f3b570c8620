"""The parts of the suite by name: what each measures, in the shapes of 1B and 8B models, or in tiny ones on a CPU.

A part imports what it needs when it is asked for, so that one that lacks a package does not take the others with it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import torch

from bench.gpu.measure import Rates, Stopwatch, measure_rates
from bench.gpu.task import Task


@dataclass(frozen=True)
class Suite:
    """What all parts get. `directory` is for files, and is removed when the part ends."""

    device: torch.device
    seed: int
    repeats: int
    directory: Path

    @property
    def tiny(self) -> bool:
        return self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Returns bfloat16 on a GPU; float16 in the self-test, since the interpreter rounds it correctly."""
        return torch.float16 if self.tiny else torch.bfloat16

    @cached_property
    def watch(self) -> Stopwatch:
        return Stopwatch(self.device, self.repeats)

    @cached_property
    def rates(self) -> Rates:
        """Returns the GPU's rates, measured when they are first asked for. The memory that this took is given back:
        some parts have other processes on the GPU, which divide what they find free."""
        copy_bytes, matmul_size = (1 << 20, 64) if self.tiny else (4 << 30, 8192)
        rates = measure_rates(self.watch, copy_bytes=copy_bytes, matmul_size=matmul_size, dtype=self.dtype)
        torch.cuda.empty_cache()
        return rates


def _attention(suite: Suite) -> Iterable[Task]:
    from paged_kernels.kv_scales import FP8

    from bench.gpu.attention_cases import Batch, Shapes, attention_tasks, batch_tasks

    dtype = suite.dtype
    if suite.tiny:
        shapes = Shapes(4, 2, 64, 16, 3, decode=((2, 40), (1, 600)), prefill=((0, 33), (20, 17)))
        batches: tuple[Batch, ...] = (
            Batch(4, 2, 16, dtype, FP8, ((20, 3), (9, 1), (0, 0)), window=8),
            Batch(2, 1, 16, dtype, dtype, ((20, 1), (0, 1), (0, 0))),
        )
    else:
        decode = ((64, 4096), (1, 4096), (16, 4096), (256, 1024), (1, 32768))
        prefill = ((0, 512), (0, 2048), (0, 8192), (8192, 512), (32_768, 12))
        shapes = Shapes(32, 8, 128, 16, 32, decode=decode, prefill=prefill)
        decodes = ((0, 1), (1, 1), (15, 1), (16, 1), (63, 1), (64, 1), (999, 1), (5000, 1), (0, 0), (0, 0))
        mixed = ((0, 700), (300, 129), (77, 1), (4000, 1), (16, 17), (0, 1), (1000, 64), (31, 33))
        kinds = (
            (32, 8, 128, torch.bfloat16), (32, 8, 64, torch.bfloat16), (14, 2, 64, torch.float16),
            (32, 32, 80, torch.bfloat16), (16, 2, 96, torch.bfloat16), (8, 4, 256, torch.bfloat16),
            (28, 4, 128, torch.float32), (32, 8, 128, torch.float16),
        )  # fmt: skip
        batches = tuple(
            Batch(num_heads, num_kv_heads, head_dim, of, pool, sequences, window)
            for num_heads, num_kv_heads, head_dim, of in kinds
            for pool, window in ((of, None), (FP8, 200))  # each compiles for seconds
            for sequences in (decodes, mixed)
        )
        batches += tuple(Batch(32, 8, 128, dtype, dtype, sequences, 200) for sequences in (decodes, mixed))
        batches += tuple(Batch(32, 8, 128, dtype, FP8, sequences) for sequences in (decodes, mixed))
    return chain(
        attention_tasks(shapes, dtype, suite.watch, suite.rates), batch_tasks(batches, suite.watch, suite.rates)
    )


def _flex(suite: Suite) -> Iterable[Task]:
    from bench.gpu.attention_cases import Shapes, flex_tasks

    shapes = Shapes(32, 8, 128, 16, 32, decode=((64, 4096),), prefill=((0, 8192),))
    if suite.tiny:
        shapes = Shapes(4, 2, 64, 16, 2, decode=((2, 40),), prefill=((0, 33),))
    return flex_tasks(shapes, suite.dtype, suite.watch, suite.rates)


def _layers(suite: Suite) -> Iterable[Task]:
    from bench.gpu.layer_cases import Sizes, layer_tasks

    sizes = Sizes(64, 4096, 14336, 32, 8, 128, 32, 128256, prequantized_rows=(1, 16, 64, 256, 1024))
    if suite.tiny:
        sizes = Sizes(3, 256, 64, 4, 2, 64, 1, 300, prequantized_rows=(3, 257))
    return layer_tasks(sizes, suite.dtype, suite.watch, suite.rates)


def _models(suite: Suite) -> Iterable[Task]:
    from bench.gpu.model_cases import KINDS, model_tasks

    return model_tasks(KINDS[:1] if suite.tiny else KINDS, suite.device, suite.directory)


def _engine(shape: str, *, by_kernel: bool = False) -> Callable[[Suite], Iterable[Task]]:
    def tasks(suite: Suite) -> Iterable[Task]:
        from bench.gpu.engine_cases import EnginePlan, engine_tasks, kernel_tasks
        from bench.random_model import SHAPES
        from kvrelay.engine.gpu.runner import StepLimits

        measured = kernel_tasks if by_kernel else engine_tasks
        config = SHAPES[shape]()
        if suite.tiny:
            config.update({"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1})
            config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32})
            limits = StepLimits(max_num_seqs=3, max_num_batched_tokens=24, max_model_len=64)
            plan = EnginePlan("tiny", config, ((3, 6),), ((2, 9),), (20,), (2, 6, 2), 1, 1, limits)
            return measured(plan, torch.float32, suite.device, suite.rates, suite.seed)
        limits = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=9216)
        decode = ((64, 1024), (1, 1024), (16, 1024), (256, 1024))
        mixed = ((0, 16), (0, 128), (20, 30), (100, 15), (63, 449), (63, 1985))
        plan = EnginePlan(shape, config, decode, mixed, (512, 2048, 8192), (64, 512, 128), 64, 3, limits)
        return measured(plan, suite.dtype, suite.device, suite.rates, suite.seed)

    return tasks


def _transfer(suite: Suite) -> Iterable[Task]:
    from bench.connectors import BLOCK_SIZES
    from bench.gpu.transfer_cases import transfer_tasks

    sizes = tuple(BLOCK_SIZES)[: 1 if suite.tiny else None]
    return transfer_tasks(suite.device, suite.rates, sizes, megabytes=4 if suite.tiny else 1024)


def _cluster(suite: Suite) -> Iterable[Task]:
    from bench.gpu.cluster_cases import ClusterLoad, cluster_tasks, import_process_modules

    import_process_modules()
    load = ClusterLoad("cuda", "llama-1b", prompts=(512, 2048, 8192), new=32)
    ways: tuple[str, ...] = ("staged", "direct")
    if suite.tiny:
        load, ways = ClusterLoad("cpu", "tiny", prompts=(20,), new=4), ("staged",)
    return cluster_tasks(load, ways, suite.rates, suite.seed, suite.directory)


def _tune(suite: Suite) -> Iterable[Task]:
    from bench.gpu.tuning import tuning_tasks

    shapes = ((64, 4095, 1), (64, 1023, 1), (1, 0, 8192), (1, 0, 2048), (16, 4095, 1))
    if suite.tiny:
        return tuning_tasks(((1, 39, 1), (1, 0, 33)), 1, suite.dtype, suite.watch, suite.rates)
    return tuning_tasks(shapes, 8, suite.dtype, suite.watch, suite.rates)


PARTS: Mapping[str, Callable[[Suite], Iterable[Task]]] = MappingProxyType(
    {
        "engine-8b": _engine("llama-8b"),
        "attention": _attention,
        "layers": _layers,
        "models": _models,
        "engine-1b": _engine("llama-1b"),
        "transfer": _transfer,
        "cluster": _cluster,
        "kernels-8b": _engine("llama-8b", by_kernel=True),
        "flex": _flex,
        "tune": _tune,
    }
)
"""In the order in which they run: the most important first. The profiler and Inductor have parts of their own, because
both may hang, and everything timed after them in the same process is slower."""
