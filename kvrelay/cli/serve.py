"""`kvrelay serve MODEL`: a whole cluster on this machine, as real processes that end together.

The nodes start first, each on a free port, then the router with their addresses; a process that ends by itself is
started again at its address. The cores are divided, because two processes with more threads than there are cores are
many times slower than with one thread each. A node lends the cores that it does not use
(`kvrelay/core/process/core_table.py`).
"""

import asyncio
import json
import os
import re
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import CliPositionalArg

from kvrelay.cli.shared_descriptors import create_core_table, create_weight_store
from kvrelay.cli.supervisor import ChildCommand, ChildFailedError, ReadyLine, Supervisor
from kvrelay.cli.thread_environment import thread_environment
from kvrelay.core.config.fields import ENV_PREFIX, flag_of, variable_of
from kvrelay.core.config.option_types import MOST_THREADS
from kvrelay.core.config.settings import ProcessSettings, load_settings
from kvrelay.core.errors import ConfigurationError, ModelLoadError
from kvrelay.core.kv.connectors import parse_connectors
from kvrelay.core.model.directory import resolve_model_directory
from kvrelay.core.model.tokenizer_files import refuse_without_tokenizer
from kvrelay.core.process.cgroup import available_cores
from kvrelay.core.process.core_table import CoreTable
from kvrelay.core.process.lifecycle import on_stdin_closed, say_ready
from kvrelay.core.process.listening import check_port
from kvrelay.core.process.standard_error import StandardError
from kvrelay.engine.loading.config_json import read_config
from kvrelay.node.settings import NodeOptions
from router.settings import RouterOptions

_standard_error = StandardError()


def _threads(value: object) -> object:
    """Refuses what is no number of threads with one message, where the union would give one for each of its types."""
    if value != "auto" and not (re.fullmatch(r"[0-9]{1,9}", str(value)) and 1 <= int(str(value)) <= MOST_THREADS):
        raise ValueError(f"must be auto or between 1 and {MOST_THREADS}")
    return value


# The router and nodes get their options as they were set; the fields declared here are only serve's.
class ServeSettings(RouterOptions, NodeOptions):
    """Serve a model from this machine: prefill nodes, decode nodes and a router, each a process of its own.

    Example: kvrelay serve ./my-model --prefill-nodes 1 --decode-nodes 2
    """

    model: CliPositionalArg[str] = Field(default="", description="Directory of the model, or its Hugging Face name.")
    prefill_nodes: int = Field(
        default=1,
        ge=0,
        description="Number of prefill nodes; with 0, decode nodes do their own prefill, which on a CPU of two cores "
        "gives about as many tokens per second, with one process and one KV pool less.",
    )
    decode_nodes: int = Field(default=1, ge=1, description="Number of decode nodes.")
    threads: Annotated[int | Literal["auto"], BeforeValidator(_threads)] = Field(
        default="auto", description="CPU threads per node; auto divides the cores."
    )
    lend_cores: bool = Field(
        default=True,
        description="An idle node lends its cores to the others until it has work again. While prompts queue on "
        "another node, one that only decodes also lends them between its steps. --no-lend-cores keeps every node to "
        "its own. Linux only.",
    )
    share_weights: bool = Field(
        default=True,
        description="Nodes that compute on CPUs share one copy of the model's weights, except those of AWQ and GPTQ "
        "checkpoints; --no-share-weights gives every node its own, in large pages. Linux only.",
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=0.95,
        description="Share of the GPU's memory for all nodes, or of free RAM for their KV; unset: 0.9 of a GPU, "
        "1 GiB per node on a CPU, or one sequence of max_model_len if that is more, but at most an equal share of the "
        "free RAM for each node, and one for everything else.",
    )
    cluster_secret: SecretStr = Field(
        default=SecretStr(""),
        description="For the ucx connector; empty: a random one for this run. Belongs in KVRELAY_CLUSTER_SECRET.",
    )
    start_timeout: float = Field(default=900.0, gt=0, description="Seconds that loading the model may take.")
    stop_timeout: float = Field(default=10.0, gt=0, description="Seconds a process has to end before it is killed.")
    json_ready: bool = Field(default=False, description="When ready, print one JSON line instead of the summary.")
    supervised: bool = Field(
        default=False, description="Exit when standard input closes (for programs that start this one)."
    )

    @property
    def num_nodes(self) -> int:
        return self.prefill_nodes + self.decode_nodes

    def node_threads(self, cores: int) -> int:
        """Returns the threads of each node on a machine with so many cores."""
        return max(1, cores // self.num_nodes) if self.threads == "auto" else self.threads


def serve(argv: Sequence[str]) -> int:
    """Serves until Ctrl-C or SIGTERM and returns 0, or returns 1 when the cluster cannot go on."""
    settings = load_settings(ServeSettings, argv, prog="kvrelay serve")
    try:  # before nodes start, which may take minutes
        check_port(settings.host, settings.port, flag="--port")
        check_port(settings.host, settings.grpc_port, flag="--grpc-port")
        directory = resolve_model_directory(settings.model)
        read_config(directory / "config.json")
        refuse_without_tokenizer(directory)
        return asyncio.run(_serve(settings))
    except (ConfigurationError, ModelLoadError) as error:
        print(f"kvrelay serve: {error}", file=sys.stderr)
        return 1


async def _serve(settings: ServeSettings) -> int:
    loop = asyncio.get_running_loop()
    if settings.supervised:
        on_stdin_closed(lambda: cluster.cancel())
    cluster = asyncio.create_task(_run_cluster(settings))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup has it ignored
            loop.add_signal_handler(number, _end, cluster, number)
    try:
        await cluster
    except asyncio.CancelledError:
        _say("ended.")
        return 0
    except ChildFailedError as error:
        _say(f"the cluster has ended: {error}")
        return 1
    return 0


def _end(cluster: "asyncio.Task[None]", number: int) -> None:
    """Ends the cluster in order because of a signal. A second one interrupts that; SIGHUP does not, because a shell may
    send it once more when its terminal is closed."""
    if number != signal.SIGHUP or not cluster.cancelling():
        cluster.cancel()


async def _run_cluster(settings: ServeSettings) -> None:
    # Not for settings, which core/config/settings.py has read: children get it explicitly, without our own variables.
    environment = child_environment(os.environ)
    async with Supervisor(stop_timeout=settings.stop_timeout, on_line=_standard_error.write_from) as supervisor:
        cores = available_cores()
        num_nodes, threads = settings.num_nodes, settings.node_threads(cores)
        table = create_core_table(cores, num_nodes, threads, say=_say) if settings.lend_cores else None
        store = create_weight_store(num_nodes, say=_say) if settings.share_weights else None
        commands = node_commands(settings, environment, cores=cores, core_table=table, weight_store=store)
        _say(f"starting {', '.join(command.name for command in commands)} for {settings.model}")
        ready = await supervisor.start(commands, timeout=settings.start_timeout)
        addresses = [str(line["address"]) for line in ready]
        prefill, decode = addresses[: settings.prefill_nodes], addresses[settings.prefill_nodes :]
        router = router_command(settings, environment, prefill=prefill, decode=decode)
        [router_line] = await supervisor.start([router], timeout=settings.start_timeout)
        _announce(settings, router_line)
        await supervisor.keep(
            make_successor=successor,
            timeout=settings.start_timeout,
            on_event=_note,
            on_end=_release_cores(commands, table),
        )


def _release_cores(commands: Sequence[ChildCommand], core_table: int | None) -> Callable[[ChildCommand], None]:
    """Returns a function that gives a node's cores to the others when the node has ended."""
    if core_table is None:
        return lambda command: None
    table = CoreTable(core_table)
    entries = {command.name: entry for entry, command in enumerate(commands)}

    def release(command: ChildCommand) -> None:
        if command.name in entries:
            table.claim(entries[command.name], 0)

    return release


def node_commands(
    settings: ServeSettings,
    environment: Mapping[str, str],
    *,
    cores: int,
    core_table: int | None = None,
    weight_store: int | None = None,
) -> list[ChildCommand]:
    """Returns the commands of all nodes, prefill nodes first. `core_table` is the descriptor of a table with an entry
    for each node in this order, `weight_store` that of the memory for their weights."""
    num_nodes, threads = settings.num_nodes, settings.node_threads(cores)
    roles = ["prefill"] * settings.prefill_nodes + ["decode"] * settings.decode_nodes
    shared = dict(environment)
    connectors = parse_connectors(settings.connector)
    if "redis" in connectors:  # not a flag: its password would be in the process list
        shared[variable_of("redis_url")] = settings.redis_url.get_secret_value()
    if "ucx" in connectors:  # no flag either
        secret = settings.cluster_secret.get_secret_value() or secrets.token_hex(32)
        shared[variable_of("cluster_secret")] = secret
    commands: list[ChildCommand] = []
    for index, role in enumerate(roles):
        name = f"{role}-{index if role == 'prefill' else index - settings.prefill_nodes}"
        flags = ["--host", "127.0.0.1", "--port", "0", "--node-id", name, "--threads", str(threads)]
        # The router ends before the nodes, so that nobody waits for what a node still has to do.
        flags += ["--drain-timeout", str(settings.stop_timeout / 2), "--nodes-per-device", str(num_nodes)]
        if core_table is not None:
            flags += ["--core-table", f"{core_table}:{index}"]
        if weight_store is not None:
            flags += ["--weight-store", str(weight_store)]
        if settings.gpu_memory_utilization is not None:
            flags += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization / num_nodes)]
        commands.append(
            ChildCommand(
                name=name,
                arguments=_python(f"{role}_node", [*flags, *_flags(settings, NodeOptions)], settings.model),
                environment={**shared, **thread_environment(shared, threads)},
                descriptors=tuple(found for found in (core_table, weight_store) if found is not None),
            )
        )
    return commands


def router_command(
    settings: ServeSettings, environment: Mapping[str, str], *, prefill: Sequence[str], decode: Sequence[str]
) -> ChildCommand:
    """Returns the command of a router with nodes at these addresses."""
    flags = ["--decode-nodes", ",".join(decode)]
    if prefill:
        flags += ["--prefill-nodes", ",".join(prefill)]
    flags += ["--stop-timeout", str(settings.stop_timeout / 2)]  # the rest is for ending what then still runs
    arguments = _python("router", [*flags, *_flags(settings, RouterOptions)], settings.model)
    return ChildCommand(name="router", arguments=arguments, environment=environment)


def successor(command: ChildCommand, ready: ReadyLine) -> ChildCommand:
    """Returns the command with the ports that the process has drawn, at which the others know it, and with the size of
    its pool in host memory: of what is free when a successor starts, the other nodes' pools have taken some, and in a
    smaller pool the longest sequences that the cluster has admitted may have no room."""
    found = {
        "--port": ready.get("address") or ready.get("http_address"),
        "--grpc-port": ready.get("grpc_address"),
        "--num-blocks": ready.get("num_host_blocks"),
    }
    end = command.arguments.index("--")  # of the flags
    flags, model = list(command.arguments[:end]), command.arguments[end:]
    for flag, value in found.items():
        if value is not None:
            if flag not in flags:
                flags += [flag, ""]
            flags[flags.index(flag) + 1] = str(value).rpartition(":")[2]
    return replace(command, arguments=(*flags, *model))


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without kvrelay's settings, which children get as flags."""
    return {name: value for name, value in environment.items() if not name.startswith(ENV_PREFIX)}


def _python(module: str, flags: Sequence[str], model: str) -> tuple[str, ...]:
    """Returns the arguments of a child. The path of a model may begin with a dash, and so comes after all flags."""
    return (sys.executable, "-P", "-m", module, "--supervised", *flags, "--", model)


def _flags(settings: ServeSettings, options: type[ProcessSettings]) -> list[str]:
    """Returns as flags those of a child's options that were set; for the others it has the same defaults. Secrets do
    not become flags: see `node_commands`."""
    flags: list[str] = []
    for name in sorted(settings.model_fields_set & options.model_fields.keys() - ProcessSettings.model_fields.keys()):
        value = getattr(settings, name)
        if isinstance(value, bool):
            flags.append(flag_of(name if value else f"no_{name}"))
        elif isinstance(value, tuple):
            flags.append(f"{flag_of(name)}={','.join(value)}")
        elif value is not None and not isinstance(value, SecretStr):
            # A text may begin with a dash, and would be taken for a flag if it stood alone.
            flags += [f"{flag_of(name)}={value}"] if isinstance(value, str) else [flag_of(name), str(value)]
    return flags


def _announce(settings: ServeSettings, ready: ReadyLine) -> None:
    http, grpc, model = (str(ready[name]) for name in ("http_address", "grpc_address", "model"))
    if settings.json_ready:
        line = {"event": "ready", "role": "cluster", "http_address": http, "grpc_address": grpc, "model": model}
        say_ready(json.dumps(line))
        return
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 16})
    say_ready(
        f"\nkvrelay serves {model} at http://{http}/v1 and gRPC {grpc}. Ctrl-C ends it. Try:\n"
        f"  curl http://{http}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}\n"
    )


def _say(message: str) -> None:
    _standard_error.write_from("serve", message)


def _note(event: str) -> None:
    """Says what has happened, with the time as in the lines of the log beside it."""
    _standard_error.write_from("serve", f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {event}")
