"""What a step of the engine costs besides the model: scheduling, input preparation, sampling, results.

    python -m bench.step_overhead demo/model DIR_OF_A_LARGER_MODEL --threads 1

Runs the engine as `LLM` builds it while a whole batch decodes. The parts are timed by wrapping methods of the engine
from outside; "results" is whatever else a step does. Every part is given as its own median over the steps.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

from bench.arguments import positive, script_parser
from bench.figures import Figure, add_json_file, write_figures
from bench.python_speed import python_speed
from kvrelay.core.errors import ConfigurationError, KVRelayError
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.cpu.runner import CpuRunner
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv_pool import allocate_pool
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.request import EngineRequest
from kvrelay.engine.startup import PreparedEngine, prepare_engine

_WARMUP_STEPS = 10
_PARTS = ("schedule", "inputs", "forward", "sampling")
_COLUMNS = (*_PARTS, "results", "overhead", "step")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One model at one batch size. Times are milliseconds; `overhead` is a step without the model's forward pass, and
    `overhead_share` the median of its share of a step."""

    model: str
    batch: int
    schedule: float
    inputs: float
    forward: float
    sampling: float
    results: float
    overhead: float
    step: float
    overhead_share: float


class Stopwatch:
    """The seconds that each part has taken since the last `take`. Parts do not nest."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(_PARTS, 0.0)

    def timed(self, function: Callable[P, R], part: str) -> Callable[P, R]:
        """Returns `function` with its time counted as `part`."""

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self._seconds[part] += time.perf_counter() - start
            return result

        return call

    def take(self) -> dict[str, float]:
        seconds = self._seconds
        self._seconds = dict.fromkeys(seconds, 0.0)
        return seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__file__, __doc__)
    parser.add_argument("models", nargs="+", metavar="DIR", help="model directories, one or several")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 16], help="sequences per step")
    parser.add_argument("--steps", type=positive, default=200, help="measured decode steps")
    parser.add_argument("--prompt-len", type=positive, default=128, help="prompt tokens of every sequence")
    parser.add_argument("--temperature", type=float, default=0.0, help="of sampling; 0 is greedy")
    parser.add_argument("--top-k", type=int, default=0, help="of sampling; 0 is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="of sampling; 1 is off")
    parser.add_argument("--repetition-penalty", type=float, default=1.0, help="of sampling; 1 is off")
    parser.add_argument("--min-tokens", type=int, default=0, help="tokens before which nothing may end an output")
    parser.add_argument(
        "--logprobs", type=int, help="log-probabilities of so many likely tokens beside each (default: none)"
    )
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads")
    add_json_file(parser)
    arguments = parser.parse_args(argv)
    found: list[Measurement] = []
    try:
        sampling = SamplingParams(
            ignore_eos=True,
            seed=0,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            repetition_penalty=arguments.repetition_penalty,
            min_tokens=arguments.min_tokens,
            logprobs=arguments.logprobs,
        )
        for model in arguments.models:
            prepared = prepare_engine(EngineOptions(model=model, threads=arguments.threads))
            _check(parser, prepared, arguments)
            for batch in arguments.batch:
                found.append(_measure(prepared, batch, arguments.steps, arguments.prompt_len, sampling))
    except KVRelayError as error:
        sys.exit(f"bench.step_overhead: {error}")
    print(python_speed())
    print(_table(found))
    write_figures(arguments.json_file, [figure for one in found for figure in _figures(one)])


def _check(parser: argparse.ArgumentParser, prepared: PreparedEngine, arguments: argparse.Namespace) -> None:
    """Ends the process when this engine cannot decode so many sequences at a time, or for so many steps."""
    model, max_num_seqs = prepared.options.model, prepared.options.max_num_seqs
    if max(arguments.batch) > max_num_seqs:
        parser.error(f"--batch: a step with {model} has at most {max_num_seqs} sequences")
    # The step that ends a prompt makes a token, too, and none may be the last one that there is room for.
    room = prepared.size.max_model_len - _WARMUP_STEPS - 2
    if arguments.prompt_len + arguments.steps > room:
        parser.error(f"--prompt-len and --steps: with {model} they add up to at most {room}")


def _measure(
    prepared: PreparedEngine, batch: int, num_steps: int, prompt_len: int, sampling: SamplingParams
) -> Measurement:
    kv_pool = allocate_pool(prepared.layout, prepared.size.num_blocks)
    engine = prepared.build(kv_pool, retract=lambda block_ids: None, publish=False)
    stopwatch = Stopwatch()
    sampling = replace(sampling, max_tokens=prepared.size.max_model_len - prompt_len)
    sampling.validate(vocab_size=prepared.loaded.config.vocab_size)
    for index in range(batch):
        prompt = tuple((7919 * index + 31 * position) % 256 for position in range(prompt_len))
        engine.add(EngineRequest(str(index), prompt, sampling))
    while not _all_decode(engine, batch):
        engine.step()
    with _timed(engine, stopwatch):
        samples = [_step(engine, stopwatch) for _ in range(num_steps + _WARMUP_STEPS)][_WARMUP_STEPS:]
    _all_decode(engine, batch)  # none has ended meanwhile
    for index in range(batch):
        engine.abort(str(index))
    engine.check_idle()
    milliseconds = {part: 1e3 * statistics.median(sample[part] for sample in samples) for part in samples[0]}
    share = statistics.median(sample["overhead"] / sample["step"] for sample in samples)
    return Measurement(Path(prepared.options.model).name, batch, overhead_share=share, **milliseconds)


def _all_decode(engine: Engine, batch: int) -> bool:
    """Raises ConfigurationError when one of the sequences has ended."""
    load = engine.load()
    if load.num_requests_running + load.num_requests_waiting < batch:
        raise ConfigurationError(
            f"the first of {batch} sequences ended too early: lower --batch, --prompt-len or --steps"
        )
    return load.num_requests_decoding == batch


@contextmanager
def _timed(engine: Engine, stopwatch: Stopwatch) -> Iterator[None]:
    """Replaces the methods of this engine's parts by timed ones. It reaches into the engine, in which nothing knows of
    being measured; the attributes are written out, so that mypy sees when one is renamed."""
    scheduler, runner = engine._scheduler, engine._runner
    assert isinstance(runner, CpuRunner), "only steps on the CPU have these parts"
    model, sampler = runner._model, runner._sampler
    reserve, schedule, inputs = scheduler.reserve, scheduler.schedule, runner._inputs
    forward, compute_logits, sample = model.forward, model.compute_logits, sampler.sample
    scheduler.reserve = stopwatch.timed(reserve, "schedule")  # type: ignore[method-assign]
    scheduler.schedule = stopwatch.timed(schedule, "schedule")  # type: ignore[method-assign]
    runner._inputs = stopwatch.timed(inputs, "inputs")  # type: ignore[method-assign]
    model.forward = stopwatch.timed(forward, "forward")  # type: ignore[method-assign]
    model.compute_logits = stopwatch.timed(compute_logits, "forward")  # type: ignore[method-assign]
    sampler.sample = stopwatch.timed(sample, "sampling")  # type: ignore[method-assign]
    try:
        yield
    finally:
        model.forward, model.compute_logits = forward, compute_logits  # type: ignore[method-assign]


def _step(engine: Engine, stopwatch: Stopwatch) -> dict[str, float]:
    stopwatch.take()
    start = time.perf_counter()
    engine.step()
    total = time.perf_counter() - start
    parts = stopwatch.take()
    return {
        **parts,
        "results": total - sum(parts.values()),
        "overhead": total - parts["forward"],
        "step": total,
    }


def _figures(one: Measurement) -> list[Figure]:
    name, values = f"{one.model}, batch {one.batch}", asdict(one)
    columns = [Figure(f"{name}: {column}", values[column], "ms") for column in _COLUMNS]
    return [*columns, Figure(f"{name}: overhead of a step", one.overhead_share)]


def _table(found: Sequence[Measurement]) -> str:
    lines = [
        f"| model | batch | {' | '.join(f'{column} ms' for column in _COLUMNS)} | overhead % |",
        "|---|---|" + "---|" * (len(_COLUMNS) + 1),
    ]
    for one in found:
        values = asdict(one)
        cells = " | ".join(f"{values[column]:.3f}" for column in _COLUMNS)
        lines.append(f"| {one.model} | {one.batch} | {cells} | {100 * one.overhead_share:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
