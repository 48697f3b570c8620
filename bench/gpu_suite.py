"""Checks and times every GPU kernel: against float64 on fresh random inputs, against its floor, against torch.

    python bench/gpu_suite.py --output gpu.json

The floor is the larger of the bytes a kernel must move over the card's copy bandwidth and its operations over the
card's matrix rate, both measured first. `--self-test` runs tiny shapes in Triton's interpreter, where times mean
nothing. The exit status is 1 when a result is wrong.
"""

import argparse
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.gpu.measure import Rates, Stopwatch, measure_rates
from bench.gpu.report import Result, table, write_json


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
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
    rates, results = run_suite(watch, tiny=args.self_test)
    print(f"copy {rates.copy / 1e9:.0f} GB/s, matmul {rates.matmul / 1e12:.1f} TFLOP/s, seed {args.seed}")
    print(table(results))
    if args.output:
        write_json(args.output, results, rates, device, args.seed)
    return 0 if all(result.is_right for result in results) else 1


def run_suite(watch: Stopwatch, *, tiny: bool) -> tuple[Rates, list[Result]]:
    """A card runs the shapes of an 8B model in bfloat16; the self-test float16, which the interpreter rounds right."""
    from bench.gpu.attention_cases import Shapes, attention_cases
    from bench.gpu.layer_cases import Sizes, layer_cases

    if tiny:
        dtype = torch.float16
        rates = measure_rates(watch, copy_bytes=1 << 20, matmul_size=64, dtype=dtype)
        shapes = Shapes(4, 2, 64, 16, decode=((2, 40), (1, 600)), prefill=((0, 33), (20, 17)))
        sizes = Sizes(3, 128, 64, 4, 2, 64, 300)
    else:
        dtype = torch.bfloat16
        rates = measure_rates(watch, copy_bytes=1 << 30, matmul_size=8192, dtype=dtype)
        decode = ((1, 4096), (16, 4096), (64, 4096), (256, 1024), (1, 32768))
        prefill = ((0, 512), (0, 2048), (0, 8192), (8192, 512))
        shapes = Shapes(32, 8, 128, 16, decode=decode, prefill=prefill)
        sizes = Sizes(64, 4096, 14336, 32, 8, 128, 128256)
    results = [case.measure(watch, rates) for case in attention_cases(shapes, dtype, watch.device)]
    results += [case.measure(watch, rates) for case in layer_cases(sizes, dtype, watch.device)]
    return rates, results


if __name__ == "__main__":
    sys.exit(main())
