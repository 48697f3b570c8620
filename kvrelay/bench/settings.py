"""Settings of the four `kvrelay bench` commands: what they share, then one class each, whose docstring opens its
`--help`."""

import json
import math
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, PlainSerializer, SecretStr, model_validator

from kvrelay.bench.applicable import check_applicable
from kvrelay.bench.base import PromptFormat
from kvrelay.bench.json_body import OWN_FIELDS
from kvrelay.bench.slo import Slos
from kvrelay.bench.workloads import Lengths
from kvrelay.core.config.fields import Placeholder, flag_of
from kvrelay.core.config.option_types import Timeout
from kvrelay.core.config.settings import ProcessSettings
from kvrelay.core.errors import ConfigurationError

GRPC_SCHEME = "grpc://"


def _is_lengths(text: str) -> str:
    Lengths.parse(text)
    return text


def _is_url(url: str) -> str:
    if not url.startswith(("http://", "https://", GRPC_SCHEME)):
        raise ValueError(f"{url!r} must begin with http://, https:// or {GRPC_SCHEME}")
    if "@" in urlsplit(url).netloc:  # result files hold the address
        raise ValueError("must have no user and password; a key belongs in KVRELAY_API_KEY")
    return url


def _is_key(key: SecretStr) -> SecretStr:
    if not key.get_secret_value().isprintable():
        raise ValueError("has a character that no header may hold, such as the end of a line")
    return key


def _is_extra_body(text: str) -> str:
    try:
        fields = json.loads(text)
        json.dumps(fields, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("must be a JSON object")
    if own := sorted(OWN_FIELDS & fields.keys()):
        raise ValueError(f"must not have {', '.join(own)}, which other settings decide")
    return text


def _for_json(rate: float) -> float | str:
    return "inf" if math.isinf(rate) else rate


LengthsText = Annotated[str, AfterValidator(_is_lengths)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=True), PlainSerializer(_for_json, when_used="json")]
"""Requests per second; inf is all at once."""


class BenchSettings(ProcessSettings):
    """Settings of every command: a server, how prompts are made, how answers are judged, where results go."""

    is_client = True

    url: Annotated[str, AfterValidator(_is_url)] = Field(
        default="http://127.0.0.1:8000",
        description="The server: http://host:port (OpenAI-compatible), or grpc://host:port (a kvrelay router).",
    )
    endpoint: Literal["completions", "chat"] = Field(
        default="completions", description="Over HTTP: /v1/completions or /v1/chat/completions."
    )
    model: str = Field(default="", description="Name of the model; empty: the only one served.")
    api_key: Annotated[SecretStr, AfterValidator(_is_key)] = Field(
        default=SecretStr(""), description="Sent as bearer token; belongs in KVRELAY_API_KEY."
    )
    tokenizer: str | None = Field(
        default=None,
        description="Directory of a model, or name of one in the Hugging Face cache, to take tokens from; unset: the "
        "model's name.",
    )
    vocab_size: int | None = Field(
        default=None, ge=2, description="In place of a tokenizer, for prompts of token ids: ids below this are sent."
    )
    prompt_format: Literal["auto", "token_ids", "text"] = Field(
        default="auto", description="How completions and gRPC get prompts; auto: token ids, whose number is exact."
    )
    input_len: LengthsText = Field(default="512", description="Prompt tokens of a request: 512, or 128-512.")
    output_len: LengthsText = Field(default="64", description="Output tokens of a request: 64, or 16-64.")
    requests: int = Field(default=32, ge=1, description="Measured requests (conversations, for multi-turn).")
    warmup: int = Field(
        default=1, ge=0, description="Requests sent one by one before the measurement; no figure includes them."
    )
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    top_k: int = Field(default=0, ge=0, description="Sample from so many of the likeliest tokens; 0: not sent.")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Sample from the likeliest tokens that together have this probability; 1: not sent.",
    )
    ignore_eos: bool = Field(
        default=True, description="Ask for exactly the output length; --no-ignore-eos for servers that refuse it."
    )
    keep_alive: bool = Field(
        default=True,
        description="Send many requests over one connection; --no-keep-alive for servers that close one after a few.",
    )
    extra_body: Annotated[str, AfterValidator(_is_extra_body), Placeholder("JSON")] = Field(
        default="{}",
        description="Over HTTP: further fields of every request as a JSON object, such as "
        '\'{"chat_template_kwargs": {"enable_thinking": false}}\'.',
    )
    timeout: Timeout = Field(default=600.0, description="Seconds after which a request counts as failed.")
    seed: int = Field(
        default=0, ge=0, description="Decides prompts, lengths and arrivals: the same seed gives the same load."
    )
    slo: Annotated[tuple[str, ...], Placeholder("METRIC=MS")] = Field(
        default=(),
        description="Limit in ms as METRIC=MS, repeatable: ttft, itl (longest gap), tpot (mean gap), e2e. Adds "
        "goodput, the requests per second that meet all of them.",
    )
    json_file: Path | None = Field(
        default=None, description="Write settings, environment and figures here, for a sweep also the knee."
    )
    save_requests: bool = Field(default=False, description="Put a record of every request into the JSON file.")
    plot: Path | None = Field(default=None, description="Draw a PNG here.")
    progress: Literal["auto", "on", "off"] = Field(
        default="auto", description="Show a line of progress while it runs; auto: on a terminal."
    )

    @property
    def is_grpc(self) -> bool:
        return self.url.startswith(GRPC_SCHEME)

    @property
    def effective_prompt_format(self) -> PromptFormat:
        if self.endpoint == "chat":
            return "chat"
        return "token_ids" if self.prompt_format == "auto" else self.prompt_format

    @property
    def draws_prompts(self) -> bool:
        """Tells whether prompts are made of random tokens, for which a vocabulary is needed."""
        return True

    @property
    def slos(self) -> Slos | None:
        return Slos.parse(self.slo)

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        Slos.parse(self.slo)
        if self.save_requests and self.json_file is None:
            raise ValueError("--save-requests needs --json-file")
        if self.plot is not None and self.json_file is not None and self.plot.resolve() == self.json_file.resolve():
            raise ValueError("--plot and --json-file name the same file")
        if self.endpoint == "chat" and self.prompt_format == "token_ids":
            raise ValueError("--prompt-format token_ids: a chat takes text only")
        if self.tokenizer is not None and self.vocab_size is not None:
            raise ValueError("--tokenizer has no effect with --vocab-size")
        if self.is_grpc and not self.keep_alive:
            raise ValueError("--no-keep-alive has no effect over gRPC, which has a single connection")
        if self.is_grpc and "extra_body" in self.model_fields_set:
            raise ValueError("--extra-body has no effect over gRPC, whose requests are no JSON")
        return self


class WorkloadSettings(BenchSettings):
    """Settings of the commands that offer a choice of workloads."""

    workload: Literal["random", "shared-prefix", "multi-turn"] = Field(
        default="random",
        description="What prompts share; --input-len is what each request has to itself. A setting that begins with a "
        "workload's name belongs to that workload and is refused with others.",
    )
    prefix_len: int = Field(default=1024, ge=1, description="shared-prefix: tokens of a prefix.")
    num_prefixes: int = Field(default=1, ge=1, description="shared-prefix: prefixes that requests take in turn.")
    turns: int = Field(default=4, ge=1, description="multi-turn: requests of a conversation.")
    think_time: float = Field(default=0.0, ge=0, description="multi-turn: seconds between an answer and the next turn.")

    @model_validator(mode="after")
    def _check_workload(self) -> Self:
        check_applicable(self.workload, self.model_fields_set)
        return self


class ServeBenchSettings(WorkloadSettings):
    """Send requests as users would, at a rate or with fixed concurrency, or replay a trace, and measure what they see.

    Examples:
      kvrelay bench serve --request-rate 2 --input-len 128-512 --slo ttft=2000 --slo itl=100
      kvrelay bench serve --concurrency 16 --workload shared-prefix --prefix-len 1024 --input-len 32 --output-len 16
      kvrelay bench serve --concurrency 4 --workload multi-turn --endpoint chat
      kvrelay bench serve --workload mixed --streams 8 --duration 60
      kvrelay bench serve --workload trace --trace trace.jsonl --speedup 2 --limit 100 --url grpc://127.0.0.1:8001
      kvrelay bench serve --workload dataset --dataset prompts.jsonl --concurrency 8 --endpoint chat --no-ignore-eos
    """

    workload: Literal["random", "shared-prefix", "multi-turn", "mixed", "trace", "dataset"] = Field(  # type: ignore[assignment]
        default="random",
        description="What prompts share; mixed: streams that never stop while long prompts arrive; trace: a recorded "
        "load, with its own times; dataset: prompts of a file. A setting whose description begins with a workload's "
        "name belongs to that workload and is refused with others.",
    )
    requests: int = Field(
        default=32,
        ge=1,
        description="Measured requests (conversations, for multi-turn); for mixed use --duration, for trace and "
        "dataset --limit.",
    )
    input_len: LengthsText = Field(
        default="512", description="Prompt tokens of a request: 512, or 128-512; a trace or data set has its own."
    )
    output_len: LengthsText = Field(
        default="64",
        description="Output tokens of a request: 64, or 16-64; a trace has its own, and so may a data set.",
    )
    request_rate: Rate | None = Field(
        default=None,
        description="Requests (or conversations) that arrive per second; inf: all at once. Not for mixed and trace.",
    )
    burstiness: float = Field(
        default=1.0,
        gt=0,
        description="With --request-rate: shape of the gamma distributed gaps; 1 is Poisson, less is burstier.",
    )
    concurrency: int | None = Field(default=None, ge=1, description="Requests (or conversations) at a time, at most.")
    streams: int = Field(default=8, ge=1, description="mixed: streams, with --input-len and --output-len.")
    long_input_len: LengthsText = Field(default="1500-2000", description="mixed: tokens of a long prompt.")
    long_output_len: LengthsText = Field(default="16", description="mixed: output tokens of a long prompt.")
    long_every: float = Field(default=4.0, gt=0, description="mixed: seconds between long prompts.")
    duration: float = Field(default=60.0, gt=0, description="mixed: seconds after which nothing new begins.")
    trace: Path | None = Field(
        default=None, description="trace: JSON lines of timestamp (ms), input_length, output_length, hash_ids."
    )
    speedup: float = Field(default=1.0, gt=0, description="trace: 2 replays it in half of the time.")
    dataset: Path | None = Field(
        default=None, description="dataset: JSON lines of prompt (a text) and, optionally, output_tokens."
    )
    limit: int | None = Field(
        default=None, ge=1, description="trace, dataset: take so many requests from the beginning of the file."
    )

    @property
    def draws_prompts(self) -> bool:
        return self.workload != "dataset"

    @property
    def effective_prompt_format(self) -> PromptFormat:
        return super().effective_prompt_format if self.draws_prompts or self.endpoint == "chat" else "text"

    @model_validator(mode="after")
    def _check_load(self) -> Self:
        if self.workload == "trace" and self.trace is None:
            raise ConfigurationError("--workload trace needs --trace FILE")
        if self.workload == "dataset":
            self._check_dataset()
        if self.workload not in ("mixed", "trace") and self.request_rate is None:
            if self.concurrency is None:
                raise ConfigurationError("how do requests arrive? Give --request-rate (per second) or --concurrency")
            if "burstiness" in self.model_fields_set:
                raise ConfigurationError("--burstiness has no effect without --request-rate")
        return self

    def _check_dataset(self) -> None:
        if self.dataset is None:
            raise ConfigurationError("--workload dataset needs --dataset FILE")
        for name in ("tokenizer", "vocab_size"):
            if name in self.model_fields_set:
                raise ConfigurationError(f"{flag_of(name)} has no effect with --workload dataset: no prompt is drawn")
        if self.prompt_format == "token_ids":
            raise ConfigurationError("--prompt-format token_ids: --workload dataset sends texts")


class LatencyBenchSettings(BenchSettings):
    """Send one request at a time and measure the latency of an idle server.

    Example: kvrelay bench latency --input-len 512 --output-len 64 --requests 8
    """

    requests: int = Field(default=8, ge=1, description="Measured requests.")


class ThroughputBenchSettings(WorkloadSettings):
    """Send everything at once and measure the most that a server gives.

    Example: kvrelay bench throughput --requests 32 --concurrency 16 --input-len 128-512
    """

    concurrency: int | None = Field(default=None, ge=1, description="Requests at a time, at most; unset: all.")


class SweepBenchSettings(WorkloadSettings):
    """Send the same load at several rates (or concurrencies) and draw latency over throughput; with SLOs, find the
    highest load that still meets them.

    Examples:
      kvrelay bench sweep --request-rates 0.5,1,2,4 --slo ttft=1000 --slo itl=100 --plot curve.png
      kvrelay bench sweep --concurrencies 1,2,4,8,16 --json-file curve.json
    """

    request_rates: tuple[Rate, ...] = Field(
        default=(), description="Requests per second, one run each; inf: all at once."
    )
    concurrencies: tuple[int, ...] = Field(default=(), description="Requests at a time, one run each.")
    burstiness: float = Field(
        default=1.0,
        gt=0,
        description="With --request-rates: shape of the gamma distributed gaps; 1 is Poisson, less is burstier.",
    )
    attainment: float = Field(default=0.9, gt=0, le=1, description="Share of requests that must meet the SLOs.")

    @model_validator(mode="after")
    def _check_sweep(self) -> Self:
        if bool(self.request_rates) == bool(self.concurrencies):
            raise ValueError("give either --request-rates or --concurrencies, as a list: 1,2,4")
        if min(self.concurrencies, default=1) < 1:
            raise ValueError("--concurrencies must be positive")
        if self.concurrencies and "burstiness" in self.model_fields_set:
            raise ConfigurationError("--burstiness has no effect without --request-rates")
        if "attainment" in self.model_fields_set and not self.slo:
            raise ConfigurationError("--attainment has no effect without --slo")
        return self
