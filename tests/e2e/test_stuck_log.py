"""Processes whose standard error goes to one reader that has stopped reading: `2>&1 | less`, Ctrl-S, a stalled log
shipper. They serve all the same, and end when they are told to."""

import os
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.e2e.client import router_at
from tests.e2e.cluster import FREE_PORTS, SMALL
from tests.e2e.processes import PATIENCE_SECONDS, program

LOG = ("--log-level", "debug")


def read(pipe: int) -> str:
    """Returns what is in the pipe."""
    text = b""
    with suppress(BlockingIOError):
        while piece := os.read(pipe, 1 << 16):
            text += piece
    return text.decode()


def fill(pipe: int) -> None:
    """Writes to a pipe until it takes nothing more."""
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x" * 4095 + b"\n")


def test_nobody_waits_for_the_reader_of_its_log(tmp_path: Path, model: Path, directory: Path) -> None:
    log = tmp_path / "log"
    os.mkfifo(log)
    pipe = os.open(log, os.O_RDWR | os.O_NONBLOCK)
    settings = ("--port", "0", *SMALL, *LOG, "--shared-memory-dir", str(tmp_path))  # a killed node leaves its pool
    with os.fdopen(pipe), ExitStack() as stack:
        fill(pipe)
        nodes = [
            stack.enter_context(program(role, str(model), "--node-id", role, *settings, log=log, directory=directory))
            for role in ("prefill", "decode")
        ]
        prefill, decode = (str(node.wait_ready()["address"]) for node in nodes)
        flags = ("--prefill-nodes", prefill, "--decode-nodes", decode, *FREE_PORTS, "--local-prefill-max-tokens", "0")
        routing = stack.enter_context(program("router", str(model), *flags, *LOG, log=log, directory=directory))
        router = stack.enter_context(router_at(routing.wait_ready()))
        for role in ("prefill", "decode"):
            router.wait_metric(1, "kvrelay:node_up", node=role)
        for _ in range(3):
            *_, last = router.stream_text("Once upon a time " * 20, 32)
            assert last["usage"]["completion_tokens"] == 32
        nodes[0].kill()  # of which the router's log tells
        router.wait_metric(0, "kvrelay:node_up", node="prefill")
        assert router.health()[0] == 200
        text = read(pipe)
        nodes[1].process.terminate()  # now there is room for what it logs
        assert nodes[1].process.wait(PATIENCE_SECONDS) == 0
        said = [line for line in (text + read(pipe)).splitlines() if line.strip("x")]
        assert said[0].startswith("(lines missing here: ")
        assert any("decode kvrelay.node.process: draining" in line for line in said)
        fill(pipe)
        routing.process.terminate()
        assert routing.process.wait(PATIENCE_SECONDS) == 0
