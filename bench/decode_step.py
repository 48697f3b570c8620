"""A decode step with weights in different forms: its time, the bytes it must read, and the memory's bandwidth.

    python -m bench.decode_step --threads 1

Forms: `none` (bfloat16), `shared` (bfloat16 as the nodes of `kvrelay serve` share it), `int8` and `int4` (quantised
while loading), `awq`, `gptq`, `gptq_v2` and `gptq_desc_act` (random checkpoints of 4 bits).

A step is the forward pass and the logits of a random model of a real shape, without the engine around it. Every round
measures a plain read of memory and each form of weights once, in turn. What is printed is the median over rounds, and
ratios are medians of the rounds' ratios, so that a load on the machine that comes and goes affects all of them alike.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from paged_kernels.cpu.extension import load_extension
from paged_kernels.cpu.threads import use_threads
from paged_kernels.registry import select_backend

from bench.arguments import add_threads, positive, script_parser
from bench.even_batch import even_batch
from bench.figures import Figure, add_json_file, write_figures
from bench.random_model import SHAPES, PrequantizedMethod, write_random_model
from bench.timing import torch_computes, wall_seconds
from kvrelay.core.config.option_types import Quantization
from kvrelay.core.process.weight_store import WeightStore
from kvrelay.engine.loading.loader import load_model
from kvrelay.engine.models.decoder import DecoderForCausalLM

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
_SHARED = "shared"
FORMS = (*get_args(Quantization), _SHARED, *get_args(PrequantizedMethod))
_READ_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step. `run` computes it; `num_bytes` of weights and KV are what it must read, each once."""

    name: str
    run: Callable[[], object]
    num_bytes: int


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__file__, __doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-0.5b", help="shape of the random model")
    parser.add_argument(
        "--batch", type=positive, nargs="+", default=[1, 4, 16], help="sequences per step, one or several"
    )
    parser.add_argument("--context", type=positive, default=256, help="tokens of KV per sequence")
    add_threads(parser)
    parser.add_argument("--rounds", type=positive, default=15, help="measurements of each form, besides one to warm up")
    parser.add_argument(
        "--weights", nargs="+", choices=FORMS, default=FORMS, help="forms to measure; ratios are to the first one"
    )
    add_json_file(parser)
    arguments = parser.parse_args(argv)
    if arguments.context > MAX_MODEL_LEN:
        parser.error(f"--context: a sequence has at most {MAX_MODEL_LEN} tokens")
    use_threads(arguments.threads)
    print(f"{arguments.shape}, {arguments.context} tokens of KV each, {arguments.threads} threads")
    try:
        models = {form: _load(arguments.shape, form) for form in arguments.weights}
    except ValueError as error:
        parser.error(f"--weights: {error}")
    figures: list[Figure] = []
    for batch in arguments.batch:
        steps = [_decode(name, model, batch, arguments.context) for name, model in models.items()]
        figures += _measure(batch, steps, arguments.rounds)
    write_figures(arguments.json_file, figures)


@torch.inference_mode()
def _measure(batch: int, steps: Sequence[Step], rounds: int) -> list[Figure]:
    """Prints what has been measured, and returns it."""
    memory = _memory()
    reads: list[float] = []
    seconds: dict[str, list[float]] = {step.name: [] for step in steps}
    for index in range(rounds + 1):  # the first one warms up
        with torch_computes():
            read = wall_seconds(memory.sum)
        for step in steps:
            elapsed = wall_seconds(step.run)
            if index:
                seconds[step.name].append(elapsed)
        if index:
            reads.append(memory.nbytes / read)
    plain = seconds[steps[0].name]
    bandwidth = statistics.median(reads)
    print(f"batch {batch:3}: memory read {bandwidth / 1e9:.1f} GB/s")
    figures = [Figure(f"batch {batch}: memory read", bandwidth / 1e9, "GB/s")]
    for step in steps:
        name = f"batch {batch}, {step.name}"
        times = seconds[step.name]
        ratio = statistics.median(a / b for a, b in zip(times, plain, strict=True))
        share = statistics.median(step.num_bytes / a / read for a, read in zip(times, reads, strict=True))
        print(
            f"  {step.name:6} {statistics.median(times) * 1e3:7.2f} ms (best {min(times) * 1e3:.2f}), {ratio:.2f} of "
            f"{steps[0].name}; {step.num_bytes / 1e6:.0f} MB at {share:.0%} of the read bandwidth"
        )
        figures += [
            Figure(f"{name}: step", statistics.median(times) * 1e3, "ms"),
            Figure(f"{name}: of the read bandwidth", share),
            Figure(f"{name}: of {steps[0].name}", ratio),
        ]
    return figures


def _memory() -> torch.Tensor:
    """Returns memory in large pages, as the weights are: summing it is the fastest plain read there is."""
    memory = torch.empty(1, _READ_BYTES // 2, dtype=torch.bfloat16)
    native = load_extension()
    if native is not None:
        native.prefer_huge_pages(memory)
    return memory.view(torch.int64).fill_(1)


def _decode(name: str, model: DecoderForCausalLM, batch: int, context: int) -> Step:
    config = model.config
    last = context - 1
    batched = even_batch(batch, last, 1, block_size=BLOCK_SIZE)
    tables = batched.block_tables
    slots = tables[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
    metadata = replace(batched, slot_mapping=slots)
    shape = (tables.numel(), config.num_kv_heads, config.num_layers, 2, BLOCK_SIZE, config.head_dim)
    kv_pool = torch.randn(shape, dtype=torch.float32).to(model.dtype)
    input_ids = torch.randint(0, config.vocab_size, (batch,))
    positions = torch.full((batch,), last)

    def run() -> torch.Tensor:
        return model.compute_logits(model.forward(input_ids, positions, kv_pool, metadata))

    weight_bytes = model.lm_head.num_bytes + sum(layer.num_bytes for layer in model.linear_layers())
    return Step("bf16" if name == "none" else name, run, weight_bytes + kv_pool.nbytes)


def _load(shape: str, form: str) -> DecoderForCausalLM:
    methods: tuple[PrequantizedMethod, ...] = get_args(PrequantizedMethod)
    prequantized = next((method for method in methods if method == form), None)
    quantization: Quantization = next((kind for kind in get_args(Quantization) if kind == form), "none")
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(Path(directory), shape, quantization=prequantized)
        store = WeightStore(WeightStore.create()) if form == _SHARED else None
        for _ in range(2 if store else 1):  # the second load finds the weights that the first one has stored
            loaded = load_model(
                directory,
                dtype="bfloat16",
                attention=select_backend("auto"),
                max_model_len=MAX_MODEL_LEN,
                quantization=quantization,
                weight_store=store,
            )
    print(f"loaded as {form} in {loaded.load_seconds:.1f} s")
    return loaded.model


if __name__ == "__main__":
    main()
