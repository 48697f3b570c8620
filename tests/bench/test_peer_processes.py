"""Processes of peers: they share our session, and end with all that they have started, however they end."""

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from bench.peers import processes
from bench.peers.base import PeerError
from bench.peers.processes import await_rest, run, started
from tests.bench.servers import answering


async def test_a_server_is_asked_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it may have been made without the proxy
    async with answering() as url:
        assert await asyncio.to_thread(processes._answers, f"{url}/v1/models")


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(PeerError, match="was ended after 2 s"):
        run(["sh", "-c", "sleep 60 & echo $!; wait"], log, seconds=2.0)
    _await_end(int(log.read_text().split()[-1]))
    with pytest.raises(PeerError, match="there is no program no-such-program"):
        run(["no-such-program"], log)


def test_servers_of_a_peer_share_our_session_and_end_with_what_they_started(tmp_path: Path) -> None:
    script = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    log = tmp_path / "log"
    with started([sys.executable, "-c", script], log) as child:
        deadline = time.monotonic() + 30
        while not log.read_text().endswith("\n"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        grandchild = int(log.read_text())
        assert os.getsid(child.process.pid) == os.getsid(grandchild) == os.getsid(0)
        assert os.getpgid(grandchild) == child.process.pid != os.getpgid(0)
    _await_end(grandchild)


def test_a_server_is_killed_when_ctrl_c_comes_again_while_it_ends(tmp_path: Path) -> None:
    script = "import signal, time; signal.signal(signal.SIGINT, lambda *_: print(flush=True)); print(flush=True)\n"
    script += "while True: time.sleep(60)"
    log = tmp_path / "log"

    def await_lines(count: int) -> None:
        deadline = time.monotonic() + 30
        while len(log.read_text().splitlines()) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def press_again() -> None:
        await_lines(2)  # the server was told to end
        os.kill(os.getpid(), signal.SIGINT)

    again = threading.Thread(target=press_again)
    with pytest.raises(KeyboardInterrupt), started([sys.executable, "-c", script], log) as child:
        await_lines(1)
        again.start()
    again.join()
    child.process.wait(10)
    assert child.process.returncode == -signal.SIGKILL


def test_a_turn_begins_when_servers_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    script = "import time\nwhile time.process_time() < 0.5: pass\nprint('rests', flush=True); time.sleep(60)"
    with started([sys.executable, "-c", script], log):
        while log.read_text() != "rests\n":
            time.sleep(0.01)
        assert processes._processor_seconds() > 0.4
        await_rest(60.0)
    used = iter([0.0, 1.0, 2.0, 2.0])  # as of a server that rests after a while
    monkeypatch.setattr(processes, "_REST_SECONDS", 0.001)
    monkeypatch.setattr(processes, "_processor_seconds", lambda: next(used))
    await_rest(60.0)
    assert list(used) == []
    monkeypatch.setattr(processes, "_processor_seconds", itertools.count().__next__)
    with pytest.raises(PeerError, match="--together"):
        await_rest(0.0)


def _await_end(process: int) -> None:
    """Waits for a process that was sent SIGKILL, which takes effect when the process is scheduled."""
    deadline = time.monotonic() + 10
    while _runs(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
