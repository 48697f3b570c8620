"""OpenVINO GenAI on a job of bench/peers/in_process.py, in its own environment: `python FILE MODEL_DIR JOB`."""

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
    made: list[int] = []

    def seconds(given: Sequence[Sequence[int]], num_tokens: int) -> float:
        config = genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
        inputs = [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in given]
        began = time.monotonic()
        results = pipeline.generate(inputs, [config] * len(inputs))
        taken = time.monotonic() - began
        made[:] = [len(result.m_generation_ids[0]) for result in results]
        return taken

    prompts, num_tokens = job["prompts"], job["output_tokens"]
    seconds([prompts["first"][0][1:]], 4)
    found = {
        "ready_seconds": [ready],
        "first_seconds": [seconds([prompt], 1) for prompt in prompts["first"]],
        "single_seconds": [seconds([prompt], num_tokens) for prompt in prompts["single"]],
        "batch_seconds": [seconds(prompts["batch"], num_tokens)] if prompts["batch"] else [],
        "batch_tokens": [sum(made)] if prompts["batch"] else [],
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
