"""Our `LLM` on a job of bench/peers/in_process.py: `python -m bench.peers.worker_kvrelay MODEL_DIR JOB`."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvrelay import LLM, SamplingParams

Prompts = Sequence[list[int]]


def figures_of_job(
    model: Path, prompts: Mapping[str, Prompts], *, num_tokens: int, concurrency: int
) -> dict[str, list[float]]:
    """What `run_job` of in_process.py says."""
    started = time.monotonic()
    llm = LLM(str(model), max_num_seqs=concurrency)
    ready = time.monotonic() - started

    def seconds(given: Prompts, num_tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        began = time.monotonic()
        llm.generate(given, params, progress=False)
        return time.monotonic() - began

    seconds([prompts["first"][0][1:]], 4)
    batch = prompts["batch"]
    return {
        "ready_seconds": [ready],
        "first_seconds": [seconds([prompt], 1) for prompt in prompts["first"]],
        "single_seconds": [seconds([prompt], num_tokens) for prompt in prompts["single"]],
        "batch_seconds": [seconds(batch, num_tokens)] if batch else [],
        "batch_tokens": [len(batch) * num_tokens] if batch else [],
    }


def main() -> None:
    job = json.loads(Path(sys.argv[2]).read_text())
    found = figures_of_job(
        Path(sys.argv[1]), job["prompts"], num_tokens=job["output_tokens"], concurrency=job["concurrency"]
    )
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
