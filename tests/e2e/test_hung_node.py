"""A node whose engine hangs ends by itself with an error, even when nobody asks it, so that it can be restarted."""

import subprocess
import sys
from pathlib import Path

import pytest

from kv_connector.segments.segment import sweep
from tests.e2e.processes import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(120)

# A decode node as the command line starts it, but for one message to its engine that never ends, and perhaps a device
# that does not return from what closing waits for.
HANGING_NODE = """
import sys, threading, torch
from decode_node.service import DecodeService
from kvrelay.node import process

def waits(engine):
    threading.Event().wait()

def computes(engine):
    while True:
        engine._runner._kv_pool.view(torch.uint8).fill_(0)

class HangingService(DecodeService):
    def start(self):
        super().start()
        self._node.engine_thread.post(HOW)
        if HANGS_IN_DEVICE:
            self._node.connector.close = threading.Event().wait

process._CLOSE_SECONDS = 5.0
sys.exit(process.main("decode", HangingService, sys.argv[1:]))
"""


@pytest.mark.parametrize(("how", "hangs_in_device"), [("waits", False), ("computes", False), ("waits", True)])
def test_a_node_that_hangs_ends_with_an_error(
    how: str, hangs_in_device: bool, model: Path, directory: Path, tmp_path: Path
) -> None:
    """Also if its engine computes, in memory that goes and in a thread that Python cannot end in order, and if closing
    it never ends: its segment is left then, until another node starts."""
    pools = tmp_path / "pools"
    pools.mkdir()
    arguments = (str(model), "--num-blocks", "64", "--step-timeout", "5", "--shared-memory-dir", str(pools))
    ended = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            HANGING_NODE.replace("HOW", how).replace("HANGS_IN_DEVICE", str(hangs_in_device)),
            *arguments,
        ],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_SECONDS,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert '"event": "ready"' in ended.stdout
    assert "the engine has made no step for 5 seconds" in ended.stderr
    assert ("ended without closing" in ended.stderr) is hangs_in_device
    assert sweep(pools) == hangs_in_device
    assert "Traceback" not in ended.stderr
