"""Checks and times every GPU kernel: against float64 on fresh random inputs, against its floor, against torch. Then the
whole engine: decode steps and prompts of random-weight models, against their floors and transformers. Then KV between
processes on the card, and a prefill and a decode node on it, directly and through host memory.

    python bench/gpu_suite.py --output gpu.json [--part kernels|engine|transfer]

The floor is the larger of the bytes a kernel must move over the card's copy bandwidth and its operations over the
card's matrix rate, both measured first. `--self-test` runs tiny shapes in Triton's interpreter, where times mean
nothing. The exit status is 1 when a result is wrong.
"""

import argparse
import itertools
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.gpu.measure import Rates, Stopwatch, measure_rates
from bench.gpu.report import Result, table, write_json

_PARTS = ("all", "kernels", "engine", "transfer")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    parser.add_argument("--part", choices=_PARTS, default="all", help="what to measure")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="of the inputs; fresh by default")
    parser.add_argument("--self-test", action="store_true", help="tiny shapes on the CPU, interpreted")
    args = parser.parse_args(arguments)
    if args.self_test:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which the cases below do
    elif not torch.cuda.is_available():
        parser.error("no GPU that torch can use; --self-test runs without one")
    device = torch.device("cpu" if args.self_test else "cuda")
    torch.manual_seed(args.seed)
    watch = Stopwatch(device, 1 if args.self_test else args.repeats)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    rates = suite_rates(watch, tiny=args.self_test)
    results: list[Result] = []
    if args.part in ("all", "kernels"):
        results += run_kernels(watch, rates, tiny=args.self_test)
        _report(args.output, results, rates, device, args.seed)
    later: list[Iterator[Result]] = []
    if args.part in ("all", "engine"):
        later.append(run_engine(device, rates, args.seed, tiny=args.self_test))
    if args.part in ("all", "transfer"):
        later.append(run_transfers(device, rates, args.seed, tiny=args.self_test))
    for result in itertools.chain.from_iterable(later):
        results.append(result)
        _report(args.output, results, rates, device, args.seed)  # the next may not come to its end
    print(f"copy {rates.copy / 1e9:.0f} GB/s, matmul {rates.matmul / 1e12:.1f} TFLOP/s, seed {args.seed}")
    print(table(results))
    return 0 if all(result.is_right for result in results) else 1


def _report(output: Path | None, results: Sequence[Result], rates: Rates, device: torch.device, seed: int) -> None:
    if output:
        write_json(output, results, rates, device, seed)


def suite_rates(watch: Stopwatch, *, tiny: bool) -> Rates:
    """A card runs in bfloat16; the self-test in float16, which the interpreter rounds right."""
    if tiny:
        return measure_rates(watch, copy_bytes=1 << 20, matmul_size=64, dtype=torch.float16)
    return measure_rates(watch, copy_bytes=1 << 30, matmul_size=8192, dtype=torch.bfloat16)


def run_kernels(watch: Stopwatch, rates: Rates, *, tiny: bool) -> list[Result]:
    """In the shapes of an 8B model."""
    from bench.gpu.attention_cases import Shapes, attention_cases
    from bench.gpu.layer_cases import Sizes, layer_cases

    if tiny:
        dtype = torch.float16
        shapes = Shapes(4, 2, 64, 16, decode=((2, 40), (1, 600)), prefill=((0, 33), (20, 17)))
        sizes = Sizes(3, 128, 64, 4, 2, 64, 300)
    else:
        dtype = torch.bfloat16
        decode = ((1, 4096), (16, 4096), (64, 4096), (256, 1024), (1, 32768))
        prefill = ((0, 512), (0, 2048), (0, 8192), (8192, 512))
        shapes = Shapes(32, 8, 128, 16, decode=decode, prefill=prefill)
        sizes = Sizes(64, 4096, 14336, 32, 8, 128, 128256)
    results = [case.measure(watch, rates) for case in attention_cases(shapes, dtype, watch.device)]
    return results + [case.measure(watch, rates) for case in layer_cases(sizes, dtype, watch.device)]


def run_engine(device: torch.device, rates: Rates, seed: int, *, tiny: bool) -> Iterator[Result]:
    """Models of 1B and 8B parameters; the self-test a tiny one."""
    from transformers import LlamaConfig

    from bench.gpu.engine_cases import EnginePlan, engine_cases
    from bench.random_model import SHAPES
    from kvrelay.engine.gpu.runner import StepLimits

    if tiny:
        limits = StepLimits(max_num_seqs=3, max_num_batched_tokens=24, max_model_len=64)
        config = LlamaConfig(
            vocab_size=300,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
        plan = EnginePlan("tiny", config, ((3, 6),), (20,), (2, 6, 2), 1, 1, limits)
        yield from engine_cases(plan, torch.float32, device, rates, seed)
        return
    limits = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=9216)
    decode = ((1, 1024), (16, 1024), (64, 1024), (256, 1024))
    for shape in ("llama-1b", "llama-8b"):
        plan = EnginePlan(shape, SHAPES[shape](), decode, (512, 2048, 8192), (64, 512, 128), 64, 3, limits)
        yield from engine_cases(plan, torch.bfloat16, device, rates, seed)


def run_transfers(device: torch.device, rates: Rates, seed: int, *, tiny: bool) -> Iterator[Result]:
    """The self-test moves host memory, and starts no cluster: `kvrelay serve` has its own tests."""
    from bench.connectors import BLOCK_SIZES
    from bench.gpu.transfer_cases import ClusterLoad, cluster_cases, transfer_cases

    sizes = tuple(BLOCK_SIZES)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the processes that follow need the memory
    yield from transfer_cases(device, rates, sizes[:1] if tiny else sizes, megabytes=4 if tiny else 1024)
    if not tiny:
        load = ClusterLoad(device.type, "llama-1b", prompts=(512, 2048, 8192), new=32)
        yield from cluster_cases(load, ("direct", "staged"), rates, seed)


if __name__ == "__main__":
    sys.exit(main())
