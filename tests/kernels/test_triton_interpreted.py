"""Runs `tests/kernels/triton` where Triton interprets, in a process of its own: it is told so before it is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"
ROOT = FOLDER.parents[2]


@pytest.mark.timeout(600)
def test_interpreted() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed in ", done.stdout, re.MULTILINE), f"something was left out:\n{done.stdout}"
