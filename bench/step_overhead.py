"""What a step of the engine costs besides the model: scheduling, input preparation, sampling, results.

    python -m bench.step_overhead demo/model DIR_OF_A_LARGER_MODEL --threads 1

Runs the engine as `LLM` builds it while a whole batch decodes. The parts are timed by wrapping the engine's
calls from outside; "results" is whatever else a step does. Medians over steps, each part's by itself.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvrelay.core.sampling_params import SamplingParams
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv_pool import allocate_pool
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.request import EngineRequest
from kvrelay.engine.startup import PreparedEngine, prepare_engine

_WARMUP_STEPS = 10


@dataclass(frozen=True, slots=True)
class Measurement:
    """Milliseconds. `overhead` is the step without the model; `overhead_share` the median of its share of a step."""

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
    """Seconds per part since the last `take`. Parts do not nest."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(("schedule", "inputs", "forward", "sampling"), 0.0)

    def time(self, owner: object, method: str, part: str) -> None:
        """From now on the calls of `owner.method` count as `part`."""
        original: Callable[..., object] = getattr(owner, method)

        def timed(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            result = original(*args, **kwargs)
            self._seconds[part] += time.perf_counter() - start
            return result

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        seconds = self._seconds
        self._seconds = dict.fromkeys(seconds, 0.0)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("models", nargs="+", help="model directories")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json-file", type=Path)
    arguments = parser.parse_args()
    found = []
    for model in arguments.models:
        prepared = prepare_engine(EngineOptions(model=model, threads=arguments.threads))
        for batch in arguments.batch:
            found.append(_measure(prepared, batch, arguments.steps, arguments.prompt_len, arguments.temperature))
    print(_table(found))
    if arguments.json_file is not None:
        arguments.json_file.write_text(json.dumps([asdict(one) for one in found], indent=2))


def _measure(prepared: PreparedEngine, batch: int, num_steps: int, prompt_len: int, temperature: float) -> Measurement:
    kv_pool = allocate_pool(prepared.layout, prepared.size.num_blocks)
    engine = prepared.build(kv_pool, on_evict=lambda block_ids: None, publish=False)
    stopwatch = Stopwatch()
    _wrap(engine, stopwatch)
    sampling = SamplingParams(
        max_tokens=num_steps + _WARMUP_STEPS + prompt_len, ignore_eos=True, temperature=temperature, seed=0
    )
    for index in range(batch):
        prompt = tuple((7919 * index + 31 * position) % 256 for position in range(prompt_len))
        engine.add(EngineRequest(str(index), prompt, sampling))
    while engine.load().num_requests_decoding < batch:
        engine.step()
    samples = [_step(engine, stopwatch) for _ in range(num_steps + _WARMUP_STEPS)][_WARMUP_STEPS:]
    for index in range(batch):
        engine.abort(str(index))
    engine.check_idle()
    milliseconds = {part: 1e3 * statistics.median(sample[part] for sample in samples) for part in samples[0]}
    share = statistics.median(sample["overhead"] / sample["step"] for sample in samples)
    return Measurement(Path(prepared.options.model).name, batch, overhead_share=share, **milliseconds)


def _wrap(engine: Engine, stopwatch: Stopwatch) -> None:
    """Reaches into the engine: nothing in it knows of being measured."""
    scheduler, runner = vars(engine)["_scheduler"], vars(engine)["_runner"]
    stopwatch.time(scheduler, "reserve", "schedule")
    stopwatch.time(scheduler, "schedule", "schedule")
    stopwatch.time(runner, "_inputs", "inputs")
    stopwatch.time(vars(runner)["_model"], "forward", "forward")
    stopwatch.time(vars(runner)["_model"], "compute_logits", "forward")
    stopwatch.time(vars(runner)["_sampler"], "sample", "sampling")


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


def _table(found: Sequence[Measurement]) -> str:
    parts = ("schedule", "inputs", "forward", "sampling", "results", "overhead", "step")
    lines = [
        f"| model | batch | {' | '.join(f'{part} ms' for part in parts)} | overhead % |",
        "|---|---|" + "---|" * (len(parts) + 1),
    ]
    for one in found:
        values = asdict(one)
        cells = " | ".join(f"{values[part]:.3f}" for part in parts)
        lines.append(f"| {one.model} | {one.batch} | {cells} | {100 * one.overhead_share:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
