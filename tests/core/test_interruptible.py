"""What Ctrl-C does to a process that imports."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal
from kvrelay.core.interruptible import interruptible_imports
signal.signal(signal.SIGINT, signal.{before})
try:
    with interruptible_imports():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException:  # as compiled modules and callbacks do
            print("swallowed")
        print("imported")
    os.kill(os.getpid(), signal.SIGINT)
    print("goes on")
except KeyboardInterrupt:
    print("interrupted")
"""


EXITS = """
from kvrelay.core.interruptible import exit_with

def run() -> int:
    {body}

exit_with(run)
"""


@pytest.mark.parametrize(("body", "status"), [("return 3", 3), ("raise KeyboardInterrupt", 130)])
def test_a_process_ends_with_its_status_or_that_of_an_interrupt(body: str, status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXITS.format(body=body)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", "")


@pytest.mark.parametrize(
    ("before", "status", "output"), [("default_int_handler", 130, ""), ("SIG_IGN", 0, "imported\ngoes on\n")]
)
def test_an_interrupt_ends_the_process_unless_it_is_ignored(before: str, status: int, output: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=before)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, output, "")
