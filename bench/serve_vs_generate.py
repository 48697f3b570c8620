"""A local cluster against transformers' `generate`, on the same random-weight model, in one run (`make bench`).

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
from pydantic import Field, field_validator, model_validator
from transformers import AutoConfig, AutoModelForCausalLM

from bench.arguments import drop_settings
from bench.load_prompts import prompts_of
from bench.local_cluster import local_cluster
from bench.random_model import write_random_model
from bench.topology import Topology
from bench.whole_run import whole_run
from kvrelay.bench.settings import ThroughputBenchSettings
from kvrelay.bench.summary import Summary
from kvrelay.core.config.settings import ProcessSettings, load_settings
from kvrelay.core.errors import KVRelayError
from kvrelay.core.process.cgroup import available_cores

QUICK = {"shape": "tiny", "requests": 4, "longest_prompt": 160, "output_tokens": 8, "generate_requests": 1}


class ServeVsGenerateSettings(ProcessSettings):
    """Measure TTFT, ITL and output tokens per second of a local cluster, and of transformers' generate for comparison.

    Example: make bench ARGS='--topologies 0P+1D --json-file result.json'
    """

    shape: Literal["qwen2-0.5b", "llama-1b", "tiny"] = Field(
        default="qwen2-0.5b", description="Shape of the random model."
    )
    topologies: tuple[str, ...] = Field(
        default=("1P+1D", "0P+1D"), description="Clusters to measure: prefill and decode nodes of each."
    )
    requests: int = Field(default=16, ge=1, description="Requests, all at the same time.")
    shortest_prompt: int = Field(default=128, ge=1, description="Tokens of the shortest prompt.")
    longest_prompt: int = Field(default=512, ge=1, description="Tokens of the longest prompt.")
    output_tokens: int = Field(default=64, ge=2, description="Output tokens of every request.")
    generate_requests: int = Field(default=4, ge=0, description="Prompts that generate takes, one by one; 0: none.")
    seed: int = Field(default=0, description="Seed of weights and prompts.")
    quick: bool = Field(default=False, description="Take a tiny model and a few requests, to see whether it works.")
    json_file: Path | None = Field(default=None, description="Where to write the numbers as JSON.")

    @field_validator("topologies")
    @classmethod
    def _check_topologies(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(Topology.parse(text)) for text in texts)

    @model_validator(mode="before")
    @classmethod
    def _apply_quick(cls, values: dict[str, object]) -> dict[str, object]:
        return QUICK | values if str(values.get("quick", False)).lower() in ("true", "1") else values


def main(argv: Sequence[str]) -> int:
    settings = load_settings(ServeVsGenerateSettings, argv, prog="python -m bench.serve_vs_generate")
    drop_settings()
    try:
        run(settings)
    except KVRelayError as error:
        print(f"bench.serve_vs_generate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def run(settings: ServeVsGenerateSettings) -> None:
    """Measures and prints. Raises UnavailableError when a cluster does not start or a request fails,
    KeyboardInterrupt after Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as directory:
        model = write_random_model(Path(directory) / settings.shape, settings.shape, seed=settings.seed)
        vocab_size: int = AutoConfig.from_pretrained(model).vocab_size
        prompts = prompts_of(load_of(settings, vocab_size))
        print(
            f"{settings.shape} bfloat16, {available_cores()} cores of {platform.machine()}: {len(prompts)} requests at "
            f"once, {min(map(len, prompts))}-{max(map(len, prompts))} prompt tokens, {settings.output_tokens} output "
            "tokens each",
            flush=True,
        )
        summaries: dict[str, Summary] = {}
        for topology in settings.topologies:
            summaries[topology] = measure_cluster(model, topology, settings, vocab_size)
            print(f"  {topology:9} {describe(summaries[topology])}", flush=True)
        baseline = None
        if settings.generate_requests:
            baseline = measure_generate(model, prompts[: settings.generate_requests], settings.output_tokens)
            print(
                f"  generate  {baseline:7.1f} output tokens/s, {settings.generate_requests} of the prompts in sequence"
            )
            for topology, summary in summaries.items():
                print(f"  {topology} / generate = {summary.output_tokens_per_second / baseline:.1f}")
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(as_json(settings, summaries, baseline), indent=2) + "\n")


def load_of(
    settings: ServeVsGenerateSettings, vocab_size: int, *, url: str = "http://127.0.0.1:1"
) -> ThroughputBenchSettings:
    """Returns the load of one run: all requests at once."""
    return ThroughputBenchSettings(
        url=url,
        requests=settings.requests,
        input_len=f"{settings.shortest_prompt}-{settings.longest_prompt}",
        output_len=str(settings.output_tokens),
        vocab_size=vocab_size,
        seed=settings.seed,
        progress="off",
    )


def measure_cluster(model: Path, topology: str, settings: ServeVsGenerateSettings, vocab_size: int) -> Summary:
    """Starts a cluster, sends one request to warm it up, then all at once. Raises UnavailableError when a request
    fails, KeyboardInterrupt after Ctrl-C."""
    arguments = [*Topology.parse(topology).arguments, "--log-level", "warning"]
    with local_cluster(str(model), arguments) as address:
        return whole_run(load_of(settings, vocab_size, url=f"http://{address.http}")).summary


def describe(summary: Summary) -> str:
    ttft, itl = summary.ttft, summary.itl
    assert ttft is not None and itl is not None
    return (
        f"{summary.output_tokens_per_second:7.1f} output tokens/s   TTFT p50 {ttft.p50 * 1e3:6.0f} ms, p99 "
        f"{ttft.p99 * 1e3:6.0f} ms   ITL p50 {itl.p50 * 1e3:6.1f} ms, p99 {itl.p99 * 1e3:6.1f} ms"
    )


def measure_generate(model_directory: Path, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
    """Returns output tokens per second of transformers' generate, one prompt after the other on all cores."""
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


def as_json(
    settings: ServeVsGenerateSettings, summaries: dict[str, Summary], baseline: float | None
) -> dict[str, object]:
    return {
        "settings": settings.model_dump(mode="json", exclude={"config", "json_file"}),
        "cores": available_cores(),
        "clusters": {topology: asdict(summary) for topology, summary in summaries.items()},
        "generate_tokens_per_second": baseline,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
