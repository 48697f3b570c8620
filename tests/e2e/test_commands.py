"""The output of the other commands, as a person sees it."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay import __version__
from tests.e2e.cluster import Cluster
from tests.e2e.processes import run

pytestmark = pytest.mark.timeout(120)


def test_complete_prints_the_text_and_how_it_was_served(cluster: Cluster, directory: Path) -> None:
    arguments = ("--url", cluster.grpc_address, "--temperature", "0", "--max-tokens", "16", "--stats")
    ended = run("complete", "The capital of France is", *arguments, directory=directory)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(" Paris") and ended.stdout.endswith("\n")
    assert "prefill-0 -> decode-0; prompt of " in ended.stderr


def test_complete_explains_a_refusal(cluster: Cluster, directory: Path) -> None:
    ended = run("complete", "Hello", "--url", cluster.grpc_address, "--max-tokens", "9999", directory=directory)
    assert ended.returncode == 1
    assert ended.stderr.startswith("kvrelay complete: This model's maximum context length is 4096 tokens, but 2 prompt")
    assert "Traceback" not in ended.stderr


def test_status_names_the_model_and_its_limit(cluster: Cluster, directory: Path) -> None:
    ended = run("status", "--url", cluster.grpc_address, directory=directory)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        f"{cluster.grpc_address}  serving",
        f"  {cluster.router.model}  up to 4096 tokens of prompt and output",
    ]


def test_status_without_a_router_says_how_to_start_one(directory: Path) -> None:
    ended = run("status", "--url", "127.0.0.1:1", directory=directory)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no router answers at 127.0.0.1:1. Start one with `kvrelay serve MODEL`" in ended.stderr


def test_the_port_of_http_is_told_from_that_of_grpc(cluster: Cluster, directory: Path) -> None:
    address = cluster.router.http
    ended = run("status", "--url", address, directory=directory)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"what answers at {address} speaks HTTP; give the router's gRPC address with --url" in ended.stderr


def test_version_and_help_are_printed(directory: Path) -> None:
    version = run("--version", directory=directory)
    assert (version.returncode, version.stdout) == (0, f"kvrelay {__version__}\n")
    usage = run("--help", directory=directory)
    assert usage.returncode == 0
    assert usage.stdout.startswith("usage: kvrelay COMMAND") and "serve MODEL" in usage.stdout
    of_serve = run("serve", "--help", directory=directory)
    assert of_serve.returncode == 0
    assert "usage: kvrelay serve" in of_serve.stdout and "--prefill-nodes" in of_serve.stdout


def test_a_misspelt_command_or_setting_is_named(directory: Path) -> None:
    command = run("sevre", directory=directory)
    assert command.returncode == 2
    assert "there is no command 'sevre'" in command.stderr
    setting = run("serve", "model", "--decode-node", "2", directory=directory)
    assert setting.returncode == 2
    assert "did you mean --decode-nodes?" in setting.stderr


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_help_of_a_node_is_printed_without_the_engine(role: str) -> None:
    """Loading that takes seconds. A module that is None in `sys.modules` cannot be imported."""
    program = f"import sys; sys.modules['torch'] = None; from {role}_node.__main__ import run; run()"
    command = [sys.executable, "-c", program, "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"usage: kvrelay {role}" in ended.stdout
