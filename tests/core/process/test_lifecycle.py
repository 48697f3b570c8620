"""What a process does when it begins to serve, and what tells it to stop."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.process.lifecycle import StopSignals, on_stdin_closed

READY = """
import gc
import torch
from kvrelay.core.process.lifecycle import announce_ready
announce_ready(role="test")
print(len(gc.get_objects()), gc.get_freeze_count())


def num_collections(num_objects, make):
    before = sum(generation["collections"] for generation in gc.get_stats())
    made = [make() for _ in range(num_objects)]
    return sum(generation["collections"] for generation in gc.get_stats()) - before


def cycle():
    some = []
    some.append(some)


print(num_collections(40_000, list), num_collections(200_000, cycle))
"""


def test_what_was_loaded_before_is_never_collected_again() -> None:
    ended = subprocess.run([sys.executable, "-c", READY], capture_output=True, text=True, check=True, timeout=60)
    ready, counts, collections = ended.stdout.splitlines()
    assert json.loads(ready) == {"event": "ready", "role": "test"}
    num_watched, num_kept = map(int, counts.split())
    assert num_watched < 1_000 < 50_000 < num_kept
    for_requests, for_garbage = map(int, collections.split())
    assert for_requests == 0 < for_garbage, "those that look at what lives are rare, and garbage is found"


def test_a_process_serves_also_if_nobody_takes_its_ready_line() -> None:
    serve = "from kvrelay.core.process.lifecycle import announce_ready; announce_ready(role='test')"
    with Path("/dev/full").open("w") as full_disk:
        ended = subprocess.run([sys.executable, "-c", serve], stdout=full_disk, stderr=subprocess.PIPE, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.fixture(autouse=True)
def without_nohup() -> Iterator[None]:
    """Has SIGHUP not ignored, as it is if nohup has started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


async def signalled(number: int) -> None:
    """Sends a signal to this process and returns when its handlers have run."""
    seen = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGWINCH, seen.set)
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGWINCH)
    async with asyncio.timeout(10.0):
        await seen.wait()


async def test_the_second_signal_means_haste() -> None:
    signals = StopSignals(supervised=False)
    await signalled(signal.SIGTERM)
    assert signals.stop.is_set() and not signals.hurry.is_set()
    await signalled(signal.SIGINT)
    assert signals.hurry.is_set()


async def test_a_closed_terminal_stops_without_haste_unless_it_is_to_be_ignored() -> None:
    signals = StopSignals(supervised=False)
    await signalled(signal.SIGHUP)
    await signalled(signal.SIGHUP)
    assert signals.stop.is_set() and not signals.hurry.is_set()
    await signalled(signal.SIGTERM)
    assert signals.hurry.is_set()


async def test_nohup_keeps_a_process_when_its_terminal_is_closed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = StopSignals(supervised=False)
        await signalled(signal.SIGHUP)
        assert not signals.stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("signal_first", [True, False])
async def test_a_supervised_process_hurries_when_it_is_asked_in_both_ways(
    signal_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a service is stopped, each process may get the signal twice: from the system, and from its supervisor."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin, os.fdopen(writer, "w") as supervisor:
        monkeypatch.setattr(sys, "stdin", stdin)
        signals = StopSignals(supervised=True)
        if signal_first:
            await signalled(signal.SIGTERM)
            await signalled(signal.SIGTERM)
            assert signals.stop.is_set() and not signals.hurry.is_set()
        supervisor.close()
        async with asyncio.timeout(10.0):
            await (signals.hurry if signal_first else signals.stop).wait()
            await signalled(signal.SIGTERM)
            assert signals.hurry.is_set()


async def test_the_end_of_standard_input_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays readable: a process that drains would look at it in every turn of its loop."""
    reader, writer = os.pipe()
    os.close(writer)
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        ended = asyncio.Event()
        on_stdin_closed(ended.set)
        async with asyncio.timeout(10.0):
            await ended.wait()
        assert not asyncio.get_running_loop().remove_reader(reader), "nothing looks at it any more"


async def test_a_standard_input_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as systemd's: who starts a supervised process there would believe that it ends with it."""
    with os.fdopen(os.open(os.devnull, os.O_RDONLY)) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(ConfigurationError, match=r"--supervised: standard input .* let it be a pipe"):
            StopSignals(supervised=True)
