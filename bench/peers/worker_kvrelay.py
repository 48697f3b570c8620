"""Runs a job of bench/peers/in_process.py on our `LLM`: `python -m bench.peers.worker_kvrelay MODEL_DIR JOB`."""

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
    """Returns the numbers that `run_job` of in_process.py describes."""
    started = time.monotonic()
    llm = LLM(str(model), max_num_seqs=concurrency)
    ready = time.monotonic() - started

    def timed(given: Prompts, num_tokens: int) -> tuple[float, list[float]]:
        """Returns the seconds, and how many tokens were made for each prompt."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        began = time.monotonic()
        found = llm.generate(given, params, progress=False)
        return time.monotonic() - began, [len(one.outputs[0].token_ids) for one in found]

    timed([prompts["first"][0][1:]], 4)
    first = [timed([prompt], 1)[0] for prompt in prompts["first"]]
    single = [timed([prompt], num_tokens) for prompt in prompts["single"]]
    if prompts["warm_batch"]:  # kernels for batches, and room for their KV, are made when they are first needed
        timed(prompts["warm_batch"], num_tokens)
    batch = [timed(prompts["batch"], num_tokens)] if prompts["batch"] else []
    return {
        "ready_seconds": [ready],
        "first_seconds": first,
        "single_seconds": [seconds for seconds, _ in single],
        "single_tokens": [count for _, counts in single for count in counts],
        "batch_seconds": [seconds for seconds, _ in batch],
        "batch_tokens": [count for _, counts in batch for count in counts],
    }


def main() -> None:
    job = json.loads(Path(sys.argv[2]).read_text())
    found = figures_of_job(
        Path(sys.argv[1]), job["prompts"], num_tokens=job["output_tokens"], concurrency=job["concurrency"]
    )
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
