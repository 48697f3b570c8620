"""Settings of the router process."""

import re
from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import CliPositionalArg

from kvrelay.core.config.option_types import Host, HostPort, Timeout
from kvrelay.core.config.settings import ProcessSettings
from kvrelay.core.process.logs import LogLevel


def _is_origin(origin: str) -> str:
    if origin != "*" and not re.fullmatch(r"https?://[^/\s,?#@]+", origin):
        raise ValueError(f"{origin!r} must be * or an origin such as https://chat.example.com, without a path")
    return origin


def _is_name(name: str) -> str:
    if not name.isprintable() or name != name.strip():
        raise ValueError("must be printable text that neither begins nor ends with a blank")
    return name


class RouterOptions(ProcessSettings):
    """Settings of a router that do not depend on where its nodes are; `kvrelay serve` takes them, too."""

    served_model_name: Annotated[str, AfterValidator(_is_name)] | None = Field(
        default=None, description="What clients call the model; unset: MODEL as given."
    )
    host: Host = Field(default="127.0.0.1", description="Address that clients reach; 0.0.0.0 for other machines.")
    port: int = Field(default=8000, ge=0, le=65535, description="HTTP port; 0 takes a free one.")
    grpc_port: int = Field(default=8001, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    policy: Literal["prefix_aware", "least_loaded", "round_robin"] = Field(
        default="prefix_aware",
        description="How nodes are picked for a request: prefix_aware by the blocks that they hold and by their load; "
        "least_loaded by load alone; round_robin in turn. With the last two, every prompt goes to a prefill node while "
        "one lives whose KV gets to the decode node.",
    )
    local_prefill_max_tokens: int = Field(
        default=64,
        ge=0,
        description="With policy prefix_aware, a decode node computes a prompt itself if it lacks at most this many of "
        "its tokens, or if that costs less; 0: never while a prefill node lives whose KV gets to it.",
    )
    kv_index_capacity: int = Field(
        default=262_144, ge=1, description="Most KV blocks whose holders the router remembers (about 250 bytes each)."
    )
    lease_ttl: float = Field(
        default=30.0,
        gt=0,
        le=600,  # a node grants no longer lease
        description="Seconds that a prefill node keeps blocks for a request without hearing of it, at most 600.",
    )
    request_timeout: Timeout = Field(
        default=600.0, description="Most seconds a request may take; a client's own deadline only shortens it."
    )
    max_concurrent_requests: int = Field(
        default=1024,
        ge=1,
        description="Requests that run or wait at a time; more are refused.",
    )
    max_node_losses: int = Field(
        default=3,
        ge=0,
        description="How many prefill or decode nodes may end at the same point of an output. Each time it is placed "
        "again with the tokens it has; beyond that its request fails, since it may be what ends the nodes.",
    )
    node_wait: float = Field(
        default=120.0,
        ge=0,
        description="Seconds that a request which has lost its decode node waits for one while none lives, or to know "
        "whether more than max_node_losses have ended; a new request is refused at once.",
    )
    max_body_bytes: int = Field(
        default=2 * 1024 * 1024,
        ge=1024,
        description="Largest HTTP body, or gRPC message of a client, that is read. The default has room for a prompt "
        "of 131,072 tokens, as text or as ids. All others wait while the router parses a body.",
    )
    allowed_origins: tuple[Annotated[str, AfterValidator(_is_origin)], ...] = Field(
        default=(),
        description="Origins of web pages whose scripts may call the HTTP interface from a browser, such as "
        "https://chat.example.com; * for all. By default none may.",
    )
    node_timeout: Timeout = Field(default=5.0, description="Seconds a node may take to answer a small request.")
    node_silence: float = Field(
        default=5.0,
        ge=2.0,
        description="A node is lost after this many seconds without a message; nodes send at least one a second.",
    )
    log_level: LogLevel = Field(default="info", description="Least severe messages that are logged.")

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
        if self.port == self.grpc_port != 0:
            raise ValueError("--port and --grpc-port must differ")
        return self


class RouterSettings(RouterOptions):
    """The router: HTTP and gRPC for clients, a list of nodes behind it. Prints one JSON line on standard output when it
    serves.

    Example: kvrelay router ./my-model --prefill-nodes 10.0.0.2:7000 --decode-nodes 10.0.0.3:7000,10.0.0.4:7000
    """

    model: CliPositionalArg[str] = Field(
        default="",
        description="Hugging Face directory (or cached hub name) of the model; only its tokenizer and config.json are "
        "read.",
    )
    prefill_nodes: tuple[HostPort, ...] = Field(
        default=(), description="Prefill nodes as host:port; with none, decode nodes do their own prefill."
    )
    decode_nodes: tuple[HostPort, ...] = Field(default=(), description="Decode nodes as host:port.")
    start_timeout: float = Field(
        default=10.0,
        ge=0,
        description="Seconds to wait for a decode node, and for nodes that are there but have not reported yet, before "
        "serving without them.",
    )
    stop_timeout: float = Field(
        default=5.0,
        ge=0,
        description="Seconds that running requests get to finish on a stop, and clients to take their answers; a "
        "second signal cuts this short.",
    )
    supervised: bool = Field(default=False, description="Exit when standard input closes (used by kvrelay serve).")

    @model_validator(mode="after")
    def _addresses_differ(self) -> Self:
        counts = Counter((*self.prefill_nodes, *self.decode_nodes))
        if repeated := [address for address, count in counts.items() if count > 1]:
            raise ValueError(f"listed twice among --prefill-nodes and --decode-nodes: {', '.join(repeated)}")
        return self
