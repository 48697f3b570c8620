"""How signals end `kvrelay serve`: in order, and at once only for whoever is impatient."""

import asyncio
import os
import signal

import pytest

from kvrelay.cli.serve import ServeSettings, _serve
from kvrelay.core.config.settings import load_settings

SETTINGS = load_settings(ServeSettings, ["m"], prog="kvrelay serve")


@pytest.mark.parametrize(("inherited", "ends"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
async def test_a_closed_terminal_ends_the_cluster_unless_nohup_started_it(
    inherited: signal.Handlers, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run_for_ever(settings: ServeSettings) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("kvrelay.cli.serve._run_cluster", run_for_ever)
    before = signal.signal(signal.SIGHUP, inherited)
    try:
        serving = asyncio.create_task(_serve(SETTINGS))
        await asyncio.sleep(0)
        assert (signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN) == ends
        os.kill(os.getpid(), signal.SIGHUP if ends else signal.SIGTERM)
        assert await serving == 0
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_a_terminal_that_hangs_up_twice_does_not_hurry_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell may send SIGHUP once more. After it, Ctrl-C hurries as ever."""
    asked = 0

    async def end_in_order(settings: ServeSettings) -> None:
        nonlocal asked
        with pytest.raises(asyncio.CancelledError):
            await asyncio.Event().wait()
        os.kill(os.getpid(), signal.SIGHUP)
        for _ in range(10):
            await asyncio.sleep(0)  # the loop hears of it
        asked += 1
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    monkeypatch.setattr("kvrelay.cli.serve._run_cluster", end_in_order)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        serving = asyncio.create_task(_serve(SETTINGS))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGHUP)
        assert (await serving, asked) == (0, 1)
    finally:
        signal.signal(signal.SIGHUP, before)
