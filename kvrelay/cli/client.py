"""Commands that ask a running router over gRPC: complete, chat, status. Text appears as it arrives.

This module turns gRPC errors into sentences for a person. Nothing is retried.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import grpc
from grpc_health.v1 import health_pb2
from pydantic import BeforeValidator, Field
from pydantic_settings import CliPositionalArg

from kvrelay.core.config.fields import Verbatim
from kvrelay.core.config.option_types import HostPort, Timeout
from kvrelay.core.config.settings import ProcessSettings, load_settings
from kvrelay.core.generation.sampling_params import MAX_SEED, MIN_SEED, SamplingParams
from kvrelay.core.process.terminal import printable, replace_what_it_lacks
from kvrelay.core.rpc.connections import WITHOUT_PROXY
from kvrelay.core.rpc.errors import DETAILS_KEY, stranger
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc

ROUTER_SERVICE = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name


class ClientSettings(ProcessSettings):
    """Settings of every command that asks a router."""

    is_client = True

    # With the scheme that `kvrelay bench` needs, or without it.
    url: Annotated[HostPort, BeforeValidator(lambda url: str(url).removeprefix("grpc://"))] = Field(
        default="127.0.0.1:8001", description="gRPC address of the router, host:port."
    )
    timeout: Timeout = Field(default=600.0, description="Seconds to wait for the end of an answer.")


class GenerateSettings(ClientSettings):
    """Settings of a generation. The router decides what is not set, by the OpenAI API's defaults."""

    model: str = Field(default="", description="Name of the model; empty: the only one served.")
    max_tokens: int | None = Field(default=128, gt=0, lt=2**63, description="Most tokens to generate.")
    temperature: float | None = Field(default=None, ge=0, description="0 is greedy; unset: 1.")
    top_k: int | None = Field(
        default=None, ge=0, lt=2**63, description="Sample from so many of the likeliest tokens; unset: 0, all of them."
    )
    top_p: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Sample from the likeliest tokens that together have this probability; unset: 1, all of them.",
    )
    seed: int | None = Field(
        default=None, ge=MIN_SEED, le=MAX_SEED, description="The same seed gives the same text; unset: a random one."
    )
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Verbatim()] = Field(
        default=(), description="A text at which the answer ends, as it is; repeatable."
    )
    stats: bool = Field(default=False, description="Say at the end how the request was served.")


class CompleteSettings(GenerateSettings):
    """Continue a text through a running router.

    Example: kvrelay complete "The capital of France is" --temperature 0
    """

    prompt: CliPositionalArg[str] = Field(
        default="", description="The text to continue; - reads standard input, which may be empty."
    )


class ChatSettings(GenerateSettings):
    """Talk to a running router: one answer, or a conversation when no message is given (an empty line ends it)."""

    message: CliPositionalArg[str | None] = Field(default=None, description="What to say.")
    system: str | None = Field(default=None, description="System message to begin with.")


class StatusSettings(ClientSettings):
    """Say what a running router serves and whether it is healthy; the exit status is 0 when it is."""

    timeout: Timeout = Field(default=5.0, description="Seconds to wait for an answer.")


def complete(argv: Sequence[str]) -> int:
    settings = load_settings(CompleteSettings, argv, prog="kvrelay complete")
    with _errors_as_text("complete", settings) as failed, _channel(settings) as channel:
        request = _request(settings)
        request.prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
        _print_stream(router_pb2_grpc.RouterStub(channel), request, settings)
    return failed()


def chat(argv: Sequence[str]) -> int:
    settings = load_settings(ChatSettings, argv, prog="kvrelay chat")
    messages: list[router_pb2.ChatMessage] = []
    with _errors_as_text("chat", settings) as failed, _channel(settings) as channel:
        if settings.system is not None:
            messages.append(router_pb2.ChatMessage(role="system", content=settings.system))
        stub = router_pb2_grpc.RouterStub(channel)
        for message in _user_messages(settings.message):
            messages.append(router_pb2.ChatMessage(role="user", content=message))
            request = _request(settings)
            request.chat.messages.extend(messages)
            answer = _print_stream(stub, request, settings)
            messages.append(router_pb2.ChatMessage(role="assistant", content=answer))
    return failed()


def status(argv: Sequence[str]) -> int:
    settings = load_settings(StatusSettings, argv, prog="kvrelay status")
    serving = False
    with _errors_as_text("status", settings) as failed, _channel(settings) as channel:
        state = _health(channel, timeout=settings.timeout)
        serving = state == "serving"
        print(f"{settings.url}  {state}")
        models = router_pb2_grpc.RouterStub(channel).ListModels(
            router_pb2.ListModelsRequest(), timeout=settings.timeout
        )
        for model in models.models:
            print(f"  {printable(model.id)}  up to {model.max_model_len} tokens of prompt and output")
    return failed() or (0 if serving else 1)


def _channel(settings: ClientSettings) -> grpc.Channel:
    return grpc.insecure_channel(settings.url, options=WITHOUT_PROXY)


def _health(channel: grpc.Channel, *, timeout: float) -> str:
    # HealthStub would do the same, but its type stubs lack its methods.
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    response: health_pb2.HealthCheckResponse = check(
        health_pb2.HealthCheckRequest(service=ROUTER_SERVICE), timeout=timeout
    )
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status).lower()


def _request(settings: GenerateSettings) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(
        model=settings.model,
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=SamplingParams(seed=settings.seed).seed,  # on the wire it has no sign
        stop=settings.stop,
    )


def _print_stream(
    stub: router_pb2_grpc.RouterStub, request: router_pb2.GenerateRequest, settings: GenerateSettings
) -> str:
    """Prints the text as it comes, and whether it was cut off, and returns the whole of it. Ctrl-C cancels the request
    on every node."""
    pieces: list[str] = []
    was_cut_off = False
    last: router_pb2.GenerateResponse | None = None
    stream = stub.GenerateStream(request, timeout=settings.timeout)
    try:
        for response in stream:
            for output in response.outputs:
                pieces.append(output.text)
                print(output.text, end="", flush=True)
                was_cut_off |= output.finish_reason == common_pb2.FINISH_REASON_LENGTH
            last = response
    finally:
        stream.cancel()
        if pieces:
            print(flush=True)
    if was_cut_off:
        print("(cut off here; a larger --max-tokens allows more)", file=sys.stderr)
    if settings.stats and last is not None and last.HasField("trace"):
        print(describe_trace(last), file=sys.stderr)
    return "".join(pieces)


def describe_trace(response: router_pb2.GenerateResponse) -> str:
    """Describes on one line how the request was served."""
    trace, usage = response.trace, response.usage
    nodes = f"{trace.prefill_node} -> {trace.decode_node}" if trace.prefill_node else trace.decode_node
    migrated = f"; placed again {_counted(trace.num_migrations, 'time')}" if trace.num_migrations else ""
    return (
        f"{nodes}; prompt of {_counted(usage.prompt_tokens, 'token')} in {_counted(trace.num_prompt_blocks, 'block')}: "
        f"{_counted(trace.num_computed_tokens, 'token')} computed, {trace.num_cached_tokens} found by name, "
        f"{_counted(trace.num_transferred_blocks, 'block')} moved; {_counted(usage.completion_tokens, 'token')}, "
        f"the first after {trace.ttft_seconds * 1000:.0f} ms, all after {trace.e2e_seconds * 1000:.0f} ms{migrated}"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _user_messages(message: str | None) -> Iterator[str]:
    """Yields the one message, or lines of standard input until an empty one or the end."""
    if message is not None:
        yield message
        return
    prompt = "you: " if sys.stdin.isatty() else ""
    while line := _read_line(prompt):
        yield line


def _read_line(prompt: str) -> str:
    try:
        return input(prompt).strip()
    except EOFError:
        return ""


@contextmanager
def _errors_as_text(command: str, settings: ClientSettings) -> Iterator[Callable[[], int]]:
    """Prints a gRPC error, or that an input is not text, as a sentence. Yields a function that afterwards returns the
    exit status: 1 when the router could not be reached, did not answer in time, or refused, 2 for such an input."""
    exit_status = 0
    replace_what_it_lacks()
    try:
        yield lambda: exit_status
    except grpc.RpcError as error:
        exit_status = 1
        print(f"kvrelay {command}: {printable(_sentence(error, settings))}", file=sys.stderr)
    except UnicodeError as error:  # from reading it, or from gRPC's messages, which are UTF-8
        exit_status = 2
        print(f"kvrelay {command}: the input is not UTF-8 text: {error}", file=sys.stderr)


def _sentence(error: grpc.RpcError, settings: ClientSettings) -> str:
    code, details, url = error.code(), error.details() or "", settings.url
    if any(datum.key == DETAILS_KEY for datum in error.trailing_metadata() or ()):
        return details or code.name  # the router's own words, which may be about connections, too
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"{url} has not answered within {settings.timeout:g} seconds; wait longer with --timeout."
    if found := stranger(code, details, "router"):
        return f"what answers at {url} {found}; give the router's gRPC address with --url (port 8001 by default)."
    if code is grpc.StatusCode.UNAVAILABLE and any(word in details.lower() for word in ("connect", "resolv")):
        return f"no router answers at {url}. Start one with `kvrelay serve MODEL`, or give its gRPC address with --url."
    return details or code.name
