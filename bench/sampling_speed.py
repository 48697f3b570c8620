"""Tokens and log-probabilities from logits: our kernels against torch's operations, which are used
where kernels are not compiled.

    python -m bench.sampling_speed --threads 2

Every round does each of the two once. What is printed is the median over rounds for the whole batch; ratios are medians
of the rounds' ratios. "flat" are logits of a normal distribution, so that top-p keeps more than a third of the
vocabulary; "peaked" ones have a few likely tokens among them, as a trained model's have.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from paged_kernels.cpu.threads import use_threads

from bench.arguments import add_threads, positive, script_parser
from bench.in_turn import measure_in_turn
from bench.timing import torch_computes, wall_seconds
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.sampling.logprobs import token_logprobs, token_logprobs_in_torch
from kvrelay.engine.sampling.random_bits import Draw
from kvrelay.engine.sampling.random_choice import choose, choose_in_torch

PARAMS = {
    "temperature": SamplingParams(temperature=0.7),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "temperature, top-k 20, top-p 0.8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    "min-p 0.05": SamplingParams(min_p=0.05),
}
NUM_TOP = 5


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__file__, __doc__)
    parser.add_argument("--batch", type=positive, default=16, help="rows of logits")
    parser.add_argument(
        "--vocab-size", type=positive, default=151_936, help="logits of a row (default: 151936, that of Qwen2)"
    )
    add_threads(parser)
    parser.add_argument("--rounds", type=positive, default=9, help="measurements, besides one to warm up")
    arguments = parser.parse_args(argv)
    use_threads(arguments.threads)
    torch.manual_seed(0)
    flat = 2.0 * torch.randn(arguments.batch, arguments.vocab_size)
    peaked = torch.where(torch.rand_like(flat) < 1e-4, flat + 12.0, flat)
    draws = [Draw(seed, 0, 0) for seed in range(arguments.batch)]
    for name, logits in (("flat", flat), ("peaked", peaked)):
        rows = list(logits)
        for limits, params in PARAMS.items():
            work = (rows, [params] * len(rows), draws)
            _measure(f"{name}, {limits}", partial(choose, *work), partial(choose_in_torch, *work), arguments.rounds)
        logprobs = (rows, logits.argmax(dim=-1).tolist(), NUM_TOP)
        _measure(
            f"{name}, log-probabilities of a token and the {NUM_TOP} likeliest",
            partial(token_logprobs, *logprobs),
            partial(token_logprobs_in_torch, *logprobs),
            arguments.rounds,
        )


def _measure(name: str, ours: Callable[[], object], in_torch: Callable[[], object], rounds: int) -> None:
    def torchs() -> float:
        with torch_computes():
            return wall_seconds(in_torch)

    found = measure_in_turn(rounds, lambda: wall_seconds(ours), torchs)
    own, other = statistics.median(found.ours), statistics.median(found.theirs)
    print(f"{name}: {1e3 * own:.2f} ms, torch {1e3 * other:.2f} ms; {found.ratio:.2f} of its time")


if __name__ == "__main__":
    main()
