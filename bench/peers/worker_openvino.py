"""Runs a job of bench/peers/in_process.py on OpenVINO GenAI, in its own environment: `python FILE MODEL_DIR JOB`."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openvino as ov  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]


def main() -> None:
    model, job = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    started = time.monotonic()
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs = job["concurrency"]
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
    ready = time.monotonic() - started

    def timed(given: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[int]]:
        """Returns the seconds, and how many tokens were made for each prompt."""
        config = genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in given]
        began = time.monotonic()
        results = pipeline.generate(inputs, [config] * len(inputs))
        return time.monotonic() - began, [len(result.m_generation_ids[0]) for result in results]

    prompts, num_tokens = job["prompts"], job["output_tokens"]
    timed([prompts["first"][0][1:]], 4)
    first = [timed([prompt], 1)[0] for prompt in prompts["first"]]
    single = [timed([prompt], num_tokens) for prompt in prompts["single"]]
    if prompts["warm_batch"]:  # kernels for batches, and room for their KV, are made when they are first needed
        timed(prompts["warm_batch"], num_tokens)
    batch = [timed(prompts["batch"], num_tokens)] if prompts["batch"] else []
    found = {
        "ready_seconds": [ready],
        "first_seconds": first,
        "single_seconds": [seconds for seconds, _ in single],
        "single_tokens": [count for _, counts in single for count in counts],
        "batch_seconds": [seconds for seconds, _ in batch],
        "batch_tokens": [count for _, counts in batch for count in counts],
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
