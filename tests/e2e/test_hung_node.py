"""A node whose engine hangs ends by itself with an error, even when nobody asks it, so that it can be restarted."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kv_connector.segments.segment import sweep
from tests.e2e.processes import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(120)

# A decode node as the command line starts it, but for a request, one message to its engine that never ends, and perhaps
# a device that does not return from what closing waits for.
HANGING_NODE = """
import sys, threading, torch
from decode_node.service import DecodeService
from kvrelay.core.config.settings import load_settings
from kvrelay.node import process
from kvrelay.node.settings import NodeSettings

def waits(engine):
    threading.Event().wait()

def computes(engine):
    while True:
        engine._runner._kv_pool.view(torch.uint8).fill_(0)

class HangingService(DecodeService):
    def start(self):
        super().start()
        self._node.activity.begin("a request")
        self._node.engine_thread.post(HOW)
        if HANGS_IN_DEVICE:
            self._node.connector.close = threading.Event().wait

process._CLOSE_SECONDS = 5.0
settings = load_settings(NodeSettings, sys.argv[1:], prog="kvrelay decode")
sys.exit(process.main(HangingService, settings))
"""


@contextmanager
def hanging_node(
    model: Path, directory: Path, pools: Path, *arguments: str, how: str = "waits", hangs_in_device: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Starts the node, which has its segment in the new directory `pools`. Kills it at the end if it still runs."""
    pools.mkdir()
    program = HANGING_NODE.replace("HOW", how).replace("HANGS_IN_DEVICE", str(hangs_in_device))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program, str(model), "--shared-memory-dir", str(pools), *arguments],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as node:
        try:
            yield node
        finally:
            node.kill()


@pytest.mark.parametrize(("how", "hangs_in_device"), [("waits", False), ("computes", False), ("waits", True)])
def test_a_node_that_hangs_ends_with_an_error(
    how: str, hangs_in_device: bool, model: Path, directory: Path, tmp_path: Path
) -> None:
    """Also if its engine computes, in memory that goes and in a thread that Python cannot end in order, and if closing
    it never ends: its segment is left then, until another node starts."""
    pools = tmp_path / "pools"
    arguments = ("--num-blocks", "64", "--step-timeout", "5")
    with hanging_node(model, directory, pools, *arguments, how=how, hangs_in_device=hangs_in_device) as node:
        output, errors = node.communicate(timeout=3 * PATIENCE_SECONDS)
    assert node.returncode == 1, errors
    assert '"event": "ready"' in output
    assert "the engine has made no step for 5 seconds" in errors
    assert ("ended without closing" in errors) is hangs_in_device
    assert sweep(pools) == hangs_in_device
    assert "Traceback" not in errors


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_node_that_hangs_ends_with_an_error_though_it_was_told_to_stop(
    is_noticed: bool, model: Path, directory: Path, tmp_path: Path
) -> None:
    """It neither drains for as long as it may, nor waits for its device for ever if nobody has noticed that it
    hangs."""
    limits = ("--step-timeout", "5", "--drain-timeout", "600") if is_noticed else ("--drain-timeout", "0")
    pools = tmp_path / "pools"
    with hanging_node(model, directory, pools, "--num-blocks", "64", *limits, hangs_in_device=True) as node:
        assert node.stdout is not None and '"event": "ready"' in node.stdout.readline()
        node.send_signal(signal.SIGTERM)
        _, errors = node.communicate(timeout=PATIENCE_SECONDS)
    assert node.returncode == 1, errors
    assert ("the engine has made no step for 5 seconds" in errors) is is_noticed
    assert "ended without closing" in errors
    assert sweep(pools) == 1
