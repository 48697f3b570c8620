"""Products of rows with packed bfloat16 weights: our kernel against oneDNN's, where it has one for this processor.

    python -m bench.linear_speed --threads 2
    python -m bench.linear_speed --threads 2 --instruction-set avx512_bf16    # is the one in use the fastest?

Every round multiplies many weights of a shape with each of the two in turn, twice as many bytes as the last-level cache
has, so that they come from memory as those of a model do. Both allocate every result. oneDNN's weights are in pages of
4 KiB, ours in large ones where they fill some. What is printed is the median over rounds; ratios are medians of the
rounds' ratios.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from paged_kernels import _native
from paged_kernels.cpu import packed
from paged_kernels.cpu.packed import PackedWeight
from paged_kernels.cpu.threads import use_threads
from torch import Tensor

from bench.arguments import add_threads, positive, script_parser
from bench.beyond_cache import beyond_cache_bytes
from bench.in_turn import measure_in_turn
from bench.onednn_products import has_onednn_products, onednn_linear, onednn_weight
from bench.timing import torch_computes, wall_seconds

# (outputs, inputs) in the shape qwen2-0.5b: query, key and value; the attention's output; gate and up; down.
SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864))

WeightT = TypeVar("WeightT")


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__file__, __doc__)
    parser.add_argument(
        "--rows",
        type=positive,
        nargs="+",
        default=[1, 8, 16, 33, 64, 128, 512, 2048],
        help="rows (tokens) that are multiplied at a time, one number or several",
    )
    add_threads(parser)
    parser.add_argument("--rounds", type=positive, default=5, help="measurements, besides one to warm up")
    parser.add_argument("--copies", type=positive, help="weights of each shape, instead of as many as no cache holds")
    available = [name for name in _native.available_instruction_sets() if not name.endswith("_emulated")]
    parser.add_argument(
        "--instruction-set",
        choices=available,
        default=available[0],
        help="which variant of our kernel to measure, of those that this processor can run",
    )
    arguments = parser.parse_args(argv)
    _native.set_instruction_set(arguments.instruction_set)
    use_threads(arguments.threads)
    for num_outputs, num_inputs in SHAPES:
        copies = arguments.copies or -(-beyond_cache_bytes() // (2 * num_outputs * num_inputs))
        weights = [packed.pack(torch.randn(num_outputs, num_inputs).bfloat16()) for _ in range(copies)]
        for num_rows in arguments.rows:
            _measure(torch.randn(num_rows, num_inputs).bfloat16(), weights, arguments.rounds)


def _measure(x: Tensor, weights: Sequence[PackedWeight], rounds: int) -> None:
    opaque = [onednn_weight(weight) for weight in weights] if has_onednn_products() else []

    def ours() -> float:
        return _seconds(partial(packed.linear, x), weights)

    def onednn() -> float:
        with torch_computes():
            return _seconds(partial(onednn_linear, x), opaque)

    found = measure_in_turn(rounds, ours, onednn if opaque else None)
    operations = 2 * x.shape[0] * weights[0].num_outputs * weights[0].num_inputs
    beside = ""
    if opaque:
        beside = f", oneDNN {operations / statistics.median(found.theirs) / 1e12:.2f}; {found.ratio:.2f} of its time"
    speed = operations / statistics.median(found.ours) / 1e12
    print(f"{x.shape[0]:5} x {x.shape[1]:5} x {weights[0].num_outputs:5}: {speed:.3f} TFLOP/s{beside}")


def _seconds(multiply: Callable[[WeightT], object], weights: Sequence[WeightT]) -> float:
    """Returns the mean wall time of a product, with all weights one after the other."""

    def multiply_all() -> None:
        for weight in weights:
            multiply(weight)

    return wall_seconds(multiply_all) / len(weights)


if __name__ == "__main__":
    main()
