"""`make bench`: the cluster against transformers' `generate`, on the same random-weight model, in one run.

The cluster answers all requests at the same time; `generate` takes some of the same prompts one after the other, with
every core. Both are greedy and make exactly the same number of tokens per request.
"""

import json
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from transformers import AutoConfig, AutoModelForCausalLM

from bench.random_model import write_random_model
from bench.workload import Summary, random_prompts, run_workload
from kvrelay.cli.local_cluster import local_cluster
from kvrelay.cli.serve import available_cores
from kvrelay.core.config import ProcessSettings, load_settings

QUICK = {"shape": "tiny", "requests": 4, "longest_prompt": 160, "output_tokens": 8, "generate_requests": 1}


class BenchSettings(ProcessSettings):
    """Measure TTFT, ITL and output tokens per second of a local cluster, and of transformers' generate for comparison.

    Example: make bench ARGS='--topologies 0P+1D --json-file result.json'
    """

    shape: Literal["qwen2-0.5b", "llama-1b", "tiny"] = Field(default="qwen2-0.5b", description="Of the random model.")
    topologies: tuple[str, ...] = Field(default=("1P+1D", "0P+1D"), description="Prefill and decode nodes to start.")
    requests: int = Field(default=16, ge=1, description="Requests, all at the same time.")
    shortest_prompt: int = Field(default=128, ge=1, description="Tokens of the shortest prompt.")
    longest_prompt: int = Field(default=512, ge=1, description="Tokens of the longest prompt.")
    output_tokens: int = Field(default=64, ge=2, description="Output tokens of every request.")
    generate_requests: int = Field(default=4, ge=0, description="Prompts that generate takes, one by one; 0: none.")
    seed: int = Field(default=0, description="Of weights and prompts.")
    quick: bool = Field(default=False, description="A tiny model and a few requests: does it work at all?")
    json_file: Path | None = Field(default=None, description="Where to write the numbers as JSON.")

    @model_validator(mode="before")
    @classmethod
    def _apply_quick(cls, values: dict[str, object]) -> dict[str, object]:
        return QUICK | values if str(values.get("quick", False)).lower() in ("true", "1") else values


def main(argv: Sequence[str]) -> int:
    settings = load_settings(BenchSettings, argv, prog="bench/serve_vs_generate.py")
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as directory:
        model = write_random_model(Path(directory) / settings.shape, settings.shape, seed=settings.seed)
        prompts = random_prompts(
            settings.requests,
            settings.shortest_prompt,
            settings.longest_prompt,
            vocab_size=AutoConfig.from_pretrained(model).vocab_size,
            seed=settings.seed,
        )
        print(
            f"{settings.shape} bfloat16, {available_cores()} cores of {platform.machine()}: {len(prompts)} requests at "
            f"once, {min(map(len, prompts))}-{max(map(len, prompts))} prompt tokens, {settings.output_tokens} output "
            "tokens each",
            flush=True,
        )
        summaries: dict[str, Summary] = {}
        for topology in settings.topologies:
            summaries[topology] = measure_cluster(model, topology, prompts, settings.output_tokens)
            print(f"  {topology:9} {summaries[topology]}", flush=True)
        baseline = None
        if settings.generate_requests:
            baseline = measure_generate(model, prompts[: settings.generate_requests], settings.output_tokens)
            print(
                f"  generate  {baseline:7.1f} output tokens/s, {settings.generate_requests} of the prompts in sequence"
            )
            for topology, summary in summaries.items():
                print(f"  {topology} / generate = {summary.tokens_per_second / baseline:.1f}")
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(as_json(settings, summaries, baseline), indent=2) + "\n")
    return 0


def measure_cluster(model: Path, topology: str, prompts: Sequence[Sequence[int]], output_tokens: int) -> Summary:
    """One fresh cluster, one request to warm it up, then all prompts at once. `topology` is like 1P+1D."""
    prefill, _, decode = topology.upper().removesuffix("D").partition("P+")
    arguments = ["--prefill-nodes", prefill, "--decode-nodes", decode, "--log-level", "warning"]
    with local_cluster(str(model), arguments) as address:
        run_workload(address.http, address.model, [list(reversed(prompts[0]))], output_tokens)
        return run_workload(address.http, address.model, prompts, output_tokens)


def measure_generate(model_directory: Path, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
    """Output tokens per second, one prompt after the other on all cores."""
    torch.set_num_threads(available_cores())
    model: Any = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16)
    model.eval()

    def generate(prompt: Sequence[int], num_tokens: int) -> None:
        input_ids = torch.tensor([prompt])  # [1, num_prompt_tokens]
        with torch.inference_mode():
            model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
            )

    generate(prompts[0], 2)
    started = time.monotonic()
    for prompt in prompts:
        generate(prompt, output_tokens)
    return len(prompts) * output_tokens / (time.monotonic() - started)


def as_json(settings: BenchSettings, summaries: dict[str, Summary], baseline: float | None) -> dict[str, object]:
    return {
        "settings": settings.model_dump(mode="json", exclude={"config", "json_file"}),
        "cores": available_cores(),
        "clusters": {
            topology: asdict(summary) | {"tokens_per_second": summary.tokens_per_second}
            for topology, summary in summaries.items()
        },
        "generate_tokens_per_second": baseline,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
