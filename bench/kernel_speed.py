"""Speed of attention: decode in GB/s of KV read, against plain memory reads; prefill in GFLOP/s, against torch's SDPA.

    python -m bench.kernel_speed [--fp8] [--decode 16:512] [--prefill 2048]

Decode goes over several KV pools one after the other, in all twice as many bytes as the last-level cache has, so that
KV comes from memory as that of many sequences does. With `--fp8`, decode over FP8 pools is measured in turn with decode
over pools of `--dtype`.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from paged_kernels.base import AttentionBackend, AttentionMetadata
from paged_kernels.cpu.threads import use_threads
from paged_kernels.kv_scales import FP8, KVScales
from paged_kernels.registry import select_backend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.arguments import add_threads, positive, script_parser
from bench.beyond_cache import beyond_cache_bytes
from bench.even_batch import even_batch
from bench.timing import torch_computes, wall_seconds

BLOCK_SIZE = 16
NUM_LAYERS = 4


def best_seconds(run: Callable[[], object], *, repeats: int) -> float:
    """Returns the shortest of `repeats` calls, after one that does not count."""
    run()
    return min(wall_seconds(run) for _ in range(repeats))


@dataclass(frozen=True, slots=True)
class _Run:
    """A decode over all layers of several pools, one after the other."""

    backend: AttentionBackend
    query: Tensor
    pools: Sequence[Tensor]
    metadata: AttentionMetadata

    def __call__(self) -> None:
        for pool, layer in itertools.product(self.pools, range(NUM_LAYERS)):
            self.backend.attend(self.query, pool, layer, self.metadata, scale=self.query.shape[-1] ** -0.5)


def bench_decode(backend: AttentionBackend, args: argparse.Namespace, dtype: torch.dtype) -> None:
    source = torch.ones(beyond_cache_bytes() // 4)
    with torch_computes():
        bandwidth = source.nbytes / best_seconds(source.sum, repeats=args.repeats)
    print(f"memory read: {bandwidth / 1e9:.1f} GB/s")
    scales = torch.full((NUM_LAYERS, args.kv_heads), 2.0**-6)
    over_fp8 = select_backend(args.backend, kv_scales=KVScales(scales, scales))
    for num_seqs, seq_len in args.decode:
        metadata = even_batch(num_seqs, seq_len - 1, 1, block_size=BLOCK_SIZE)
        num_blocks = metadata.block_tables.numel()
        pool = torch.randn(num_blocks, args.kv_heads, NUM_LAYERS, 2, BLOCK_SIZE, args.head_dim).to(dtype)
        query = torch.randn(num_seqs, args.heads, args.head_dim).to(dtype)
        runs = {args.dtype: _Run(backend, query, _copies(pool, args.copies), metadata)}
        if args.fp8:
            codes = (pool.float() / scales[0, 0]).to(FP8)
            runs["fp8"] = _Run(over_fp8, query, _copies(codes, args.copies), metadata)
        seconds = dict.fromkeys(runs, float("inf"))
        for _ in range(args.rounds):
            for name, run in runs.items():
                seconds[name] = min(seconds[name], best_seconds(run, repeats=args.repeats) / len(run.pools))
        for name, run in runs.items():
            rate, per_layer = run.pools[0].nbytes / seconds[name], seconds[name] / NUM_LAYERS * 1e6
            print(
                f"decode  {num_seqs:3} x {seq_len:5} {name:>8}: {per_layer:9.1f} us, {rate / 1e9:6.1f} GB/s, "
                f"{rate / bandwidth:4.0%} of memory, {seconds[name] / seconds[args.dtype]:4.2f} of {args.dtype}'s time"
            )


def _copies(pool: Tensor, number: int | None) -> list[Tensor]:
    return [pool.clone() for _ in range(number or -(-beyond_cache_bytes() // pool.nbytes))]


def bench_prefill(backend: AttentionBackend, args: argparse.Namespace, dtype: torch.dtype) -> None:
    for length in args.prefill:
        metadata = even_batch(1, 0, length, block_size=BLOCK_SIZE)
        pool = torch.randn(metadata.block_tables.numel(), args.kv_heads, 1, 2, BLOCK_SIZE, args.head_dim).to(dtype)
        query = torch.randn(length, args.heads, args.head_dim).to(dtype)
        scale = args.head_dim**-0.5
        seconds = best_seconds(lambda: backend.attend(query, pool, 0, metadata, scale=scale), repeats=args.repeats)  # noqa: B023
        q = torch.randn(1, args.heads, length, args.head_dim).to(dtype)
        kv = torch.randn(1, args.kv_heads, length, args.head_dim).to(dtype)
        with torch_computes():
            sdpa = best_seconds(
                lambda: scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True),  # noqa: B023
                repeats=args.repeats,
            )
        flops = 2 * length * length * args.heads * args.head_dim  # two products, half of each is masked
        ours, torchs = flops / seconds / 1e9, flops / sdpa / 1e9
        print(f"prefill {length:5}: {ours:6.1f} GFLOP/s, torch SDPA over contiguous KV {torchs:6.1f}")


def decode_batch(text: str) -> tuple[int, int]:
    """Parses `SEQUENCES:TOKENS`."""
    num_seqs, _, seq_len = text.partition(":")
    if not (num_seqs.isdecimal() and seq_len.isdecimal() and int(num_seqs) and int(seq_len)):
        raise argparse.ArgumentTypeError(f"{text!r}: write SEQUENCES:TOKENS, like 16:512")
    return int(num_seqs), int(seq_len)


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__file__, __doc__)
    parser.add_argument(
        "--decode",
        type=decode_batch,
        nargs="+",
        default=[(1, 4096), (16, 512), (16, 2048)],
        metavar="SEQUENCES:TOKENS",
        help="batches of decodes: sequences, and tokens of KV of each (default: 1:4096 16:512 16:2048)",
    )
    parser.add_argument("--copies", type=positive, help="KV pools of a batch, instead of as many as no cache holds")
    parser.add_argument("--prefill", type=positive, nargs="+", default=[128, 512, 2048], help="prompt lengths")
    parser.add_argument(
        "--backend", choices=("auto", "native", "reference"), default="auto", help="which kernels; auto: the fastest"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16", help="dtype of queries and pool"
    )
    parser.add_argument("--heads", type=positive, default=14, help="query heads")
    parser.add_argument("--kv-heads", type=positive, default=2, help="KV heads, which divide the query heads")
    parser.add_argument("--head-dim", type=positive, default=64, help="elements of a head")
    add_threads(parser)
    parser.add_argument("--repeats", type=positive, default=10, help="calls of which the fastest counts")
    parser.add_argument(
        "--rounds", type=positive, default=3, help="turns that the pools of a decode batch take; the fastest counts"
    )
    parser.add_argument("--fp8", action="store_true", help="also decode over an FP8 pool")
    args = parser.parse_args(argv)
    use_threads(args.threads)
    torch.manual_seed(0)
    backend = select_backend(args.backend)
    dtype: torch.dtype = getattr(torch, args.dtype)
    print(
        f"{backend.name}, {args.dtype}, {args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.threads} threads"
    )
    bench_decode(backend, args, dtype)
    bench_prefill(backend, args, dtype)


if __name__ == "__main__":
    main()
