"""`kvrelay COMMAND` as a person uses it: as a process, from any directory."""

import asyncio
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from kvrelay import __version__
from kvrelay.cli.main import COMMANDS, PROCESS_MODULES, run
from tests.free_port import free_port

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"


async def kvrelay(*argv: str, cwd: Path | None = None) -> tuple[int, str, str]:
    """Runs a command and returns its exit status, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "kvrelay", *argv),
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


def test_version_and_every_command_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvrelay {__version__}\n"
    assert run(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(command in usage for command in (*PROCESS_MODULES, *COMMANDS))


@pytest.mark.parametrize("argv", [[], ["srve"]])
def test_without_a_known_command_the_commands_are_listed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    assert "serve" in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = run([command, "--help"])
    except SystemExit as ended:
        status = ended.code
    assert status == 0
    assert f"usage: kvrelay {command} " in capsys.readouterr().out


@pytest.mark.parametrize("argv", [("--help",), ("--version",), ("complete", "--help"), ("bench", "sweep", "--help")])
def test_help_that_has_no_room_is_one_line(argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, argparse loses its help without a word
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-P", "-m", "kvrelay", *argv]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "kvrelay: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("imported", [b" grpc._typing\n", b" grpc._cython.cygrpc\n"])  # before and after a compiled one
@pytest.mark.parametrize(
    "argv",
    [
        ("kvrelay", "status", "--url={silent}"),
        ("kvrelay", "bench", "latency", "--url={silent}"),
        ("decode_node", "nowhere"),
    ],
)
async def test_ctrl_c_ends_what_still_imports_without_a_word(argv: tuple[str, ...], imported: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # if it comes as far as that
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-X", "importtime", "-P", "-m", *(word.format(silent=address) for word in argv)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        assert process.stderr is not None
        await process.stderr.readuntil(imported)
        process.send_signal(signal.SIGINT)
        errors = (await process.stderr.read()).decode()
        assert await process.wait() == 130, errors
    assert [line for line in errors.splitlines() if not line.startswith("import time:")] == []


async def test_a_folder_of_that_name_is_not_picked_up(tmp_path: Path) -> None:
    fake = tmp_path / "router"
    fake.mkdir()
    (fake / "__init__.py").touch()
    (fake / "__main__.py").write_text("print('the wrong router')")
    status, output, errors = await kvrelay("router", "--help", cwd=tmp_path)
    assert (status, errors) == (0, "")
    assert "the wrong router" not in output
    assert "usage: kvrelay router" in output


async def test_a_process_runs_with_its_standard_streams_closed() -> None:
    """They are numbers that its connections would get otherwise, and uvloop aborts a process that closes one."""
    http, grpc, node = (free_port() for _ in range(3))
    command = f"kvrelay router {MODEL} --port {http} --grpc-port {grpc} --decode-nodes 127.0.0.1:{node}"
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", f"exec {sys.executable} -P -m {command} --start-timeout 0 <&- >&- 2>&-")
    )
    try:
        async with asyncio.timeout(30.0), httpx.AsyncClient(trust_env=False) as client:
            answer = None
            while answer is None:
                assert process.returncode is None
                await asyncio.sleep(0.05)
                with suppress(httpx.ConnectError):
                    answer = await client.get(f"http://127.0.0.1:{http}/livez")
            process.terminate()
            assert (answer.status_code, await process.wait()) == (200, 0)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("argv", [("status",), ("complete", "Hello"), ("chat", "Hello")])
async def test_a_command_without_a_router_says_where_it_looked(argv: tuple[str, ...], unused_tcp_port: int) -> None:
    status, _, errors = await kvrelay(*argv, "--url", f"127.0.0.1:{unused_tcp_port}")
    assert status == 1
    assert f"no router answers at 127.0.0.1:{unused_tcp_port}" in errors
    assert "Traceback" not in errors
