"""A node whose engine hangs ends by itself with an error, even when nobody asks it, so that it can be restarted."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(120)

# A decode node as the command line starts it, but for one message to its engine that never ends.
HANGING_NODE = """
import sys, threading
from decode_node.service import DecodeService
from kvrelay.node.process import main

class HangingService(DecodeService):
    def start(self):
        super().start()
        self._node.engine_thread.post(lambda engine: threading.Event().wait())

sys.exit(main("decode", HangingService, sys.argv[1:]))
"""


def test_a_node_that_hangs_ends_with_an_error(model: Path, directory: Path) -> None:
    arguments = (str(model), "--num-blocks", "64", "--step-timeout", "5", "--node-id", "hanging")
    ended = subprocess.run(
        [sys.executable, "-P", "-c", HANGING_NODE, *arguments],
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
