"""`kvrelay COMMAND` as a person uses it: as a process, from any directory."""

import asyncio
import signal
import socket
import sys
from pathlib import Path

import pytest

from kvrelay import __version__
from kvrelay.cli.main import PROCESS_MODULES, run


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
    assert all(command in usage for command in (*PROCESS_MODULES, "serve", "complete", "chat", "status", "bench"))


@pytest.mark.parametrize("argv", [[], ["srve"]])
def test_without_a_known_command_the_commands_are_listed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    assert "serve" in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", ["serve", "complete", "chat", "status"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: kvrelay {command}" in capsys.readouterr().out


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


@pytest.mark.parametrize("argv", [("status",), ("complete", "Hello"), ("chat", "Hello")])
async def test_a_command_without_a_router_says_where_it_looked(argv: tuple[str, ...], unused_tcp_port: int) -> None:
    status, _, errors = await kvrelay(*argv, "--url", f"127.0.0.1:{unused_tcp_port}")
    assert status == 1
    assert f"no router answers at 127.0.0.1:{unused_tcp_port}" in errors
    assert "Traceback" not in errors
