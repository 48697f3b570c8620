"""What Ctrl-C does to a process that imports, and SIGTERM to one that is the first of a container."""

import signal
import subprocess
import sys

import pytest

INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"
SCRIPT = """
import os, signal
from kvrelay.core.process.interruptible import interruptible_imports
signal.signal(signal.SIGINT, signal.{before})
try:
    with interruptible_imports():
        try:
            {importing}
        except BaseException:  # as compiled modules and callbacks do
            print("swallowed")
        print("imported")
    os.kill(os.getpid(), signal.SIGINT)
    print("goes on")
except KeyboardInterrupt:
    print("interrupted")
"""

TERMINATED = """
import os, signal
os.getpid, own = lambda: {number}, os.getpid()
from kvrelay.core.process.interruptible import interruptible_imports
with interruptible_imports():
    {importing}
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
os.kill(own, signal.SIGTERM)
"""


EXITS = """
from kvrelay.core.process.interruptible import exit_with

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
    ("before", "importing", "status", "output"),
    [
        ("default_int_handler", INTERRUPT, 130, ""),
        ("default_int_handler", "pass", 0, "imported\ninterrupted\n"),
        ("SIG_IGN", INTERRUPT, 0, "imported\ngoes on\n"),
    ],
)
def test_an_interrupt_ends_the_process_only_while_it_imports_and_unless_it_is_ignored(
    before: str, importing: str, status: int, output: str
) -> None:
    script = SCRIPT.format(before=before, importing=importing)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, output, "")


@pytest.mark.parametrize(
    ("number", "importing", "status", "output"),
    [
        (1, "os.kill(own, signal.SIGTERM)", 143, ""),
        (1, "pass", 143, "False\n"),
        (2, "pass", -signal.SIGTERM, "True\n"),
    ],
)
def test_sigterm_ends_the_first_process_of_a_container(number: int, importing: str, status: int, output: str) -> None:
    """To Linux the first process of a container ignores SIGTERM unless it has a handler for it, and any other ends by
    it. The process here has another number, so that SIGTERM would end it in any case, but not with this status."""
    script = TERMINATED.format(number=number, importing=importing)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, output, "")
