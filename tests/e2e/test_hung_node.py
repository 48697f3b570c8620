"""A node whose engine hangs ends by itself with an error, even when nobody asks it, so that it can be restarted."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(120)

# A decode node as the command line starts it, but for one message to its engine that never ends.
HANGING_NODE = """
import sys, threading, torch
from decode_node.service import DecodeService
from kvrelay.node.process import main

def waits(engine):
    threading.Event().wait()

def computes(engine):
    while True:
        engine._runner._kv_pool.view(torch.uint8).fill_(0)

class HangingService(DecodeService):
    def start(self):
        super().start()
        self._node.engine_thread.post(HOW)

sys.exit(main("decode", HangingService, sys.argv[1:]))
"""


@pytest.mark.parametrize("how", ["waits", "computes"])
def test_a_node_that_hangs_ends_with_an_error(how: str, model: Path, directory: Path) -> None:
    """Also if its engine computes, in memory that goes and in a thread that Python cannot end in order."""
    arguments = (str(model), "--num-blocks", "64", "--step-timeout", "5", "--node-id", "hanging")
    ended = subprocess.run(
        [sys.executable, "-P", "-c", HANGING_NODE.replace("HOW", how), *arguments],
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
    assert "Traceback" not in ended.stderr
