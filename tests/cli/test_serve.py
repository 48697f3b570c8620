"""The commands that `kvrelay serve` would start: roles, threads, flags, and where secrets go. Which signals end it."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import pytest
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from kvrelay.cli.main import PROCESS_MODULES
from kvrelay.cli.serve import (
    ServeSettings,
    _announce,
    child_environment,
    node_commands,
    router_command,
    serve,
    successor,
)
from kvrelay.cli.shared_descriptors import create_core_table, create_weight_store
from kvrelay.cli.supervisor import ChildCommand
from kvrelay.cli.thread_environment import thread_environment
from kvrelay.core.config.settings import ProcessSettings, load_settings
from kvrelay.core.process.core_table import CoreTable
from kvrelay.node.settings import NodeOptions, NodeSettings
from router.settings import RouterOptions, RouterSettings

_Settings = TypeVar("_Settings", bound=ProcessSettings)
SECRET = "redis://:hunter2@cache:6379/0"


def settings_of(*argv: str) -> ServeSettings:
    return load_settings(ServeSettings, argv, prog="kvrelay serve")


def flag(command: ChildCommand, name: str) -> str:
    return command.arguments[command.arguments.index(name) + 1]


def child_settings(cls: type[_Settings], command: ChildCommand) -> _Settings:
    return load_settings(cls, command.arguments[4:], prog=command.name)


def test_nodes_by_role_and_number() -> None:
    commands = node_commands(settings_of("m", "--prefill-nodes", "2", "--decode-nodes", "1"), {}, cores=8)
    assert [one.name for one in commands] == ["prefill-0", "prefill-1", "decode-0"]
    assert all(one.arguments[1:3] == ("-P", "-m") for one in commands), "a safe path"
    assert [one.arguments[3] for one in commands] == ["prefill_node", "prefill_node", "decode_node"]
    assert set(PROCESS_MODULES.values()) == {"prefill_node", "decode_node", "router"}


@pytest.mark.parametrize(("cores", "expected"), [(1, "1"), (2, "1"), (3, "1"), (8, "4"), (9, "4")])
def test_cores_are_divided(cores: int, expected: str) -> None:
    for command in node_commands(settings_of("m"), {"OMP_NUM_THREADS": "64"}, cores=cores):
        assert flag(command, "--threads") == expected
        assert command.environment["OMP_NUM_THREADS"] == expected


def test_nodes_get_the_threads_that_were_asked_for() -> None:
    commands = node_commands(settings_of("m", "--threads", "3"), {}, cores=2)
    assert {flag(command, "--threads") for command in commands} == {"3"}


def test_every_node_inherits_the_store_and_the_table_and_has_its_own_entry() -> None:
    commands = node_commands(settings_of("m", "--decode-nodes", "2"), {}, cores=8, core_table=7, weight_store=9)
    nodes = [child_settings(NodeSettings, command) for command in commands]
    assert [node.core_table for node in nodes] == ["7:0", "7:1", "7:2"]
    assert {node.weight_store for node in nodes} == {9}
    assert [command.descriptors for command in commands] == [(7, 9)] * 3


@pytest.mark.parametrize("process", [ServeSettings, NodeSettings])
def test_more_threads_than_any_machine_has_cores_are_refused(
    process: type[ProcessSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_settings(process, ["m", "--threads", "1000000"], prog="kvrelay")
    refusal = capsys.readouterr().err
    assert "--threads" in refusal and "1024" in refusal


@pytest.mark.parametrize(("cores", "nodes", "threads", "expected"), [(8, 2, 4, 8), (9, 2, 4, 8), (2, 4, 1, 2)])
def test_nodes_use_together_what_they_were_given(cores: int, nodes: int, threads: int, expected: int) -> None:
    descriptor = create_core_table(cores, nodes, threads, say=pytest.fail)
    assert descriptor is not None
    table = CoreTable(descriptor)
    os.close(descriptor)
    table.claim(0, threads)
    assert table.cores_of(0) == expected


def test_one_node_has_nobody_to_share_with() -> None:
    assert create_core_table(8, 1, 8, say=pytest.fail) is None
    assert create_weight_store(1, say=pytest.fail) is None


def test_without_memory_to_share_every_node_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    said: list[str] = []
    assert create_core_table(8, 2, 4, say=said.append) is None
    assert create_weight_store(2, say=said.append) is None
    assert [message.partition(":")[0] for message in said] == [
        "nodes lend each other no cores",
        "every node has weights of its own",
    ]


def test_how_threads_wait_is_the_users_choice() -> None:
    always = {"OMP_NUM_THREADS": "2", "OMP_PROC_BIND": "false"}
    assert thread_environment({}, 2) == {**always, "GOMP_SPINCOUNT": "10000"}
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        assert thread_environment({variable: "as they like"}, 2) == always


@pytest.mark.parametrize("binding", [{"OMP_PROC_BIND": "close"}, {"GOMP_CPU_AFFINITY": "0"}, {"OMP_PLACES": "cores"}])
def test_a_node_may_use_all_cores_whatever_the_shell_binds_threads_to(binding: dict[str, str]) -> None:
    given = os.environ | binding
    code = "import os, torch; print(len(os.sched_getaffinity(0)))"
    found = subprocess.run(
        [sys.executable, "-c", code], env=given | thread_environment(given, 1), capture_output=True, check=True
    )
    assert int(found.stdout) == len(os.sched_getaffinity(0))


def test_nodes_understand_what_they_are_given() -> None:
    settings = settings_of(
        *("m", "--dtype", "bfloat16", "--num-blocks", "99", "--block-size", "32", "--max-model-len", "512"),
        *("--max-num-seqs", "4", "--max-num-batched-tokens", "128", "--attention-backend", "reference"),
        *("--gpu-memory-utilization", "0.5", "--log-level", "debug", "--connector", "ucx,redis"),
        *("--redis-ttl", "60", "--quantization", "int4", "--kv-staging-gib", "1.5"),
        *("--device", "cuda", "--enforce-eager", "--kv-cache-dtype", "fp8", "--calculate-kv-scales"),
        *("--scheduling-policy", "priority", "--fetch-timeout", "3", "--step-timeout", "90"),
    )
    node = child_settings(NodeSettings, node_commands(settings, {}, cores=2)[1])
    assert (node.model, node.node_id, node.host, node.port, node.supervised) == ("m", "decode-0", "127.0.0.1", 0, True)
    assert (node.dtype, node.num_blocks, node.block_size, node.max_model_len) == ("bfloat16", 99, 32, 512)
    assert (node.max_num_seqs, node.max_num_batched_tokens, node.attention_backend) == (4, 128, "reference")
    assert (node.gpu_memory_utilization, node.log_level, node.connector) == (0.25, "debug", "ucx,redis")
    assert (node.redis_ttl, node.quantization, node.kv_staging_gib) == (60, "int4", 1.5)
    assert (node.device, node.nodes_per_device, node.enforce_eager) == ("cuda", 2, True)
    assert (node.kv_cache_dtype, node.calculate_kv_scales) == ("fp8", True)
    assert (node.scheduling_policy, node.fetch_timeout, node.step_timeout) == ("priority", 3.0, 90.0)


def test_what_is_not_set_is_left_to_the_node() -> None:
    node = child_settings(NodeSettings, node_commands(settings_of("m"), {}, cores=2)[0])
    defaults = NodeSettings(model="m")
    same = set(NodeSettings.model_fields) - {"node_id", "threads", "supervised", "drain_timeout", "nodes_per_device"}
    assert {name: getattr(node, name) for name in same} == {name: getattr(defaults, name) for name in same}


def test_router_understands_what_it_is_given() -> None:
    settings = settings_of(
        *("m", "--port", "1", "--grpc-port", "2", "--served-model-name", "n", "--policy", "round_robin"),
        *("--lease-ttl", "7.5", "--request-timeout", "90", "--max-concurrent-requests", "12", "--max-node-losses", "0"),
        *("--node-wait", "20"),
    )
    command = router_command(settings, {}, prefill=["p:1"], decode=["d:1", "d:2"])
    router = child_settings(RouterSettings, command)
    assert (router.model, router.port, router.grpc_port, router.served_model_name) == ("m", 1, 2, "n")
    assert (router.prefill_nodes, router.decode_nodes) == (("p:1",), ("d:1", "d:2"))
    assert (router.policy, router.supervised) == ("round_robin", True)
    assert (router.lease_ttl, router.request_timeout) == (7.5, 90.0)
    assert (router.max_concurrent_requests, router.max_node_losses, router.node_wait) == (12, 0, 20.0)


@pytest.mark.parametrize("name", ["-x", "--port", "a b", "it's", 'a"b', "a/b", "é"])
def test_a_model_may_have_an_odd_name(name: str) -> None:
    settings = settings_of(f"--served-model-name={name}", "--", name)
    command = successor(router_command(settings, {}, prefill=[], decode=["d:1"]), {"http_address": "127.0.0.1:41"})
    router = child_settings(RouterSettings, command)
    assert (router.model, router.served_model_name, router.port) == (name, name, 41)


@pytest.mark.parametrize("name", [" ", "a ", "\n", "a\tb", "\x00", "\udcff"])
@pytest.mark.parametrize("process", [ServeSettings, RouterSettings])
def test_a_name_that_no_client_could_write_is_refused(
    process: type[ProcessSettings], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_settings(process, ["m", f"--served-model-name={name}"], prog="kvrelay")
    assert "--served-model-name: must be printable text" in capsys.readouterr().err


def test_the_example_of_a_request_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    ready = {"http_address": "127.0.0.1:8000", "grpc_address": "127.0.0.1:8001", "model": "it's"}
    _announce(settings_of("m", "--served-model-name", "it's"), ready)
    command = capsys.readouterr().out.partition("  curl ")[2]
    assert json.loads(shlex.split(command)[-1])["model"] == "it's"


def test_what_is_not_set_is_left_to_the_router() -> None:
    router = child_settings(RouterSettings, router_command(settings_of("m"), {}, prefill=[], decode=["d:1"]))
    defaults = RouterSettings(model="m")
    same = set(RouterSettings.model_fields) - {"decode_nodes", "supervised"}
    assert {name: getattr(router, name) for name in same} == {name: getattr(defaults, name) for name in same}


def test_children_have_half_of_the_time_to_stop_for_what_still_runs() -> None:
    settings = settings_of("m", "--stop-timeout", "3")
    router = child_settings(RouterSettings, router_command(settings, {}, prefill=[], decode=["d:1"]))
    nodes = [child_settings(NodeSettings, command) for command in node_commands(settings, {}, cores=2)]
    assert [router.stop_timeout, *(node.drain_timeout for node in nodes)] == [1.5] * 3


def test_aggregated_mode_has_no_prefill_nodes() -> None:
    settings = settings_of("m", "--prefill-nodes", "0")
    assert [command.name for command in node_commands(settings, {}, cores=2)] == ["decode-0"]
    router = child_settings(RouterSettings, router_command(settings, {}, prefill=[], decode=["d:1"]))
    assert router.prefill_nodes == ()


def test_our_own_variables_are_not_inherited() -> None:
    assert child_environment({"PATH": "/bin", "KVRELAY_PORT": "1"}) == {"PATH": "/bin"}


def test_the_redis_url_is_in_the_environment_of_the_nodes_only() -> None:
    settings = settings_of("m", "--connector", "redis", "--redis-url", SECRET)
    nodes = node_commands(settings, {}, cores=2)
    assert [node.environment["KVRELAY_REDIS_URL"] for node in nodes] == [SECRET, SECRET]
    router = router_command(settings, {}, prefill=["p:1"], decode=["d:1"])
    assert router.environment == {}
    assert not [argument for command in (*nodes, router) for argument in command.arguments if "hunter2" in argument]


def test_nodes_share_a_secret_that_is_no_argument() -> None:
    nodes = node_commands(settings_of("m", "--connector", "ucx"), {}, cores=2)
    [drawn] = {node.environment["KVRELAY_CLUSTER_SECRET"] for node in nodes}
    [another] = {
        n.environment["KVRELAY_CLUSTER_SECRET"]
        for n in node_commands(settings_of("m", "--connector", "ucx"), {}, cores=2)[:1]
    }
    assert len(drawn) == len(another) == 64 and drawn != another
    assert not [argument for node in nodes for argument in node.arguments if drawn in argument]
    tiered = node_commands(settings_of("m", "--connector", "ucx,redis", "--redis-url", SECRET), {}, cores=2)
    assert {"KVRELAY_CLUSTER_SECRET", "KVRELAY_REDIS_URL"} < set(tiered[0].environment)
    given = settings_of("m", "--connector", "ucx", "--cluster-secret", "hunter2" * 3)
    assert node_commands(given, {}, cores=2)[0].environment["KVRELAY_CLUSTER_SECRET"] == "hunter2" * 3


def test_without_redis_no_node_hears_of_it() -> None:
    for node in node_commands(settings_of("m", "--redis-url", SECRET), {}, cores=2):
        assert set(node.environment) == {"OMP_NUM_THREADS", "OMP_PROC_BIND", "GOMP_SPINCOUNT"}


@pytest.mark.parametrize(
    "argv",
    [
        *(("--threads", "0"), ("--threads", "many"), ("--decode-nodes", "0")),
        *(("--connector", "redis,ucx"), ("--block-size", "7"), ("--node-silence", "1"), ("--lease-ttl", "601")),
        # gRPC's clock ends before these timeouts.
        *(("--request-timeout", "1e10"), ("--node-timeout", "1e10")),
        ("--port", "8001"),
    ],
)
def test_a_wrong_setting_is_named(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        settings_of("m", *argv)
    assert ended.value.code == 2
    refusal = capsys.readouterr().err
    assert argv[0] in refusal
    assert refusal.count("kvrelay serve: ") == 1  # one mistake, one message


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_taken_port_is_named_before_any_process_starts(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    free = {"--port": "0", "--grpc-port": "0"}
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = {flag: str(other.getsockname()[1])}
        assert serve(["no-such-model", *(word for pair in (free | taken).items() for word in pair)]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert f"Address already in use; choose another port with {flag}" in errors


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "has no config.json: it is not a Hugging Face model directory"),
        ('{"model_type": ', "config.json is not valid JSON"),
        ('{"architectures": ["GPT2LMHeadModel"]}', "['GPT2LMHeadModel'] is not supported; supported are Llama"),
        ('{"model_type": "gpt2"}', "model_type: 'gpt2' is not supported; supported are llama"),
        ('{"model_type": "llama"}', "has no tokenizer.json, nor anything else that a tokenizer is made from"),
    ],
)
def test_a_model_that_no_node_could_run_is_named_before_any_process_starts(
    config: str | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert serve([str(tmp_path), "--port", "0", "--grpc-port", "0"]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert errors.startswith(f"kvrelay serve: {tmp_path}") and says in errors


def test_a_model_that_is_nowhere_is_named_before_any_process_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "no-such-model"
    assert serve([str(missing), "--port", "0", "--grpc-port", "0"]) == 1
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert f"{missing} is neither a directory nor a model in the local Hugging Face cache" in errors
    assert "`hf download`" in errors, "what to do"


def test_a_wrong_redis_url_is_refused_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of("m", "--connector", "redis", "--redis-url", SECRET.replace("redis://", "http://"))
    errors = capsys.readouterr().err
    assert "--redis-url: must begin with redis://" in errors
    assert "hunter2" not in errors


def another_value(field: FieldInfo) -> Any:
    """Returns a value within the field's bounds that is not the default."""
    if isinstance(field.default, bool):
        return not field.default
    if get_origin(field.annotation) is Literal:
        return next(choice for choice in get_args(field.annotation) if choice != field.default)
    if isinstance(field.default, SecretStr):
        return SecretStr(SECRET)
    if isinstance(field.default, tuple):  # of origins
        return ("https://chat.example.com", "http://localhost:3000")
    if isinstance(field.default, int):
        return 2 * field.default or 8
    return field.default * 0.75 if isinstance(field.default, float) else "redis"  # also a name, a folder or a host


@pytest.mark.parametrize("name", sorted(NodeOptions.model_fields.keys() - ProcessSettings.model_fields.keys()))
def test_every_option_of_nodes_reaches_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = another_value(NodeOptions.model_fields[name])
    settings = ServeSettings.model_validate({"model": "m", "connector": "redis", name: value})
    command = node_commands(settings, {}, cores=2)[0]
    for variable, secret in command.environment.items():
        monkeypatch.setenv(variable, secret)
    assert getattr(child_settings(NodeSettings, command), name) == value


@pytest.mark.parametrize("name", sorted(RouterOptions.model_fields.keys() - ProcessSettings.model_fields.keys()))
def test_every_option_of_the_router_reaches_it(name: str) -> None:
    value = another_value(RouterOptions.model_fields[name])
    settings = ServeSettings.model_validate({"model": "m", name: value})
    command = router_command(settings, {}, prefill=["p:1"], decode=["d:1"])
    assert getattr(child_settings(RouterSettings, command), name) == value


def test_serve_takes_every_other_setting_of_nodes_and_router() -> None:
    """A setting of nodes or router that serve does not take needs a reason here."""
    every_process = {"model", "supervised"}
    made_for_a_node = {"host", "port", "node_id", "threads", "core_table", "weight_store", "nodes_per_device"}
    made_for_a_node |= {"gpu_memory_utilization", "cluster_secret", "drain_timeout"}
    between_hosts = {"ucx_host", "ucx_net_devices"}
    only_a_nodes = NodeSettings.model_fields.keys() - NodeOptions.model_fields.keys()
    assert only_a_nodes == every_process | made_for_a_node | between_hosts
    made_for_the_router = {"prefill_nodes", "decode_nodes"}  # their addresses; serve's are their numbers
    another_meaning = {"start_timeout", "stop_timeout"}  # of nodes and requests; serve's are for whole processes
    only_the_routers = RouterSettings.model_fields.keys() - RouterOptions.model_fields.keys()
    assert only_the_routers == every_process | made_for_the_router | another_meaning


def test_what_nodes_and_router_share_is_one_option() -> None:
    """Serve takes it once and hands it to all."""
    [shared] = NodeOptions.model_fields.keys() & RouterOptions.model_fields.keys() - ProcessSettings.model_fields.keys()
    assert shared == "log_level"
    assert str(NodeOptions.model_fields[shared]) == str(RouterOptions.model_fields[shared])


@pytest.mark.parametrize("ports", [(), ("--port", "0", "--grpc-port", "0")])
def test_a_router_starts_again_at_the_ports_that_it_drew(ports: tuple[str, ...]) -> None:
    command = router_command(settings_of("m", *ports), {}, prefill=[], decode=["d:1"])
    before = child_settings(RouterSettings, command)
    drawn = (before.port or 41, before.grpc_port or 42)
    ready = {"http_address": f"127.0.0.1:{drawn[0]}", "grpc_address": f"127.0.0.1:{drawn[1]}"}
    again = child_settings(RouterSettings, successor(command, ready))
    assert (again.port, again.grpc_port) == drawn


@pytest.mark.parametrize("num_blocks", [(), ("--num-blocks", "0"), ("--num-blocks", "40")])
def test_a_node_starts_again_with_the_pool_that_it_had(num_blocks: tuple[str, ...]) -> None:
    [command] = node_commands(settings_of("m", "--prefill-nodes", "0", *num_blocks), {}, cores=2)
    ready = {"address": "127.0.0.1:41", "num_host_blocks": 40}
    again = child_settings(NodeSettings, successor(command, ready))
    assert (again.port, again.num_blocks) == (41, 40)


def test_a_node_whose_pool_is_on_a_gpu_sizes_it_again() -> None:
    [command] = node_commands(settings_of("m", "--prefill-nodes", "0"), {}, cores=2)
    again = child_settings(NodeSettings, successor(command, {"address": "127.0.0.1:41"}))
    assert (again.port, again.num_blocks) == (41, 0)
