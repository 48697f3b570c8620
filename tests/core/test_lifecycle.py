"""What a process does when it begins to serve."""

import json
import subprocess
import sys

READY = """
import gc
import torch
from kvrelay.core.lifecycle import announce_ready
announce_ready(role="test")
print(len(gc.get_objects()), gc.get_freeze_count())
"""


def test_what_was_loaded_before_is_never_collected_again() -> None:
    ended = subprocess.run([sys.executable, "-c", READY], capture_output=True, text=True, check=True, timeout=60)
    ready, counts = ended.stdout.splitlines()
    assert json.loads(ready) == {"event": "ready", "role": "test"}
    num_watched, num_kept = map(int, counts.split())
    assert num_watched < 1_000 < 50_000 < num_kept
