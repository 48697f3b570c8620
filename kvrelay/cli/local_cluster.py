"""`kvrelay serve` as a child process, for programs (demo, benchmarks, tests). Leaving the context ends the cluster.

Invariant: when the caller ends in any way, SIGKILL included, so does the cluster (`--supervised`).
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvrelay.core.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """Where a running cluster answers: `host:port` each, and the name of its model. `process`: that of `kvrelay serve`,
    which all others descend from."""

    http: str
    grpc: str
    model: str
    process: int


@contextmanager
def local_cluster(model: str, arguments: Sequence[str] = (), *, stop_timeout: float = 60.0) -> Iterator[ClusterAddress]:
    """A cluster on free ports, once it is ready. `arguments` are further ones of `kvrelay serve`.

    Its log goes to our standard error. Raises UnavailableError when it ends before it is ready, or does not end well.
    """
    command = [sys.executable, "-P", "-m", "kvrelay", "serve", model]
    command += ["--port", "0", "--grpc-port", "0", "--json-ready", "--supervised", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:  # waits, and closes the pipes
        try:
            yield _wait_until_ready(process)
        finally:
            process.terminate()
            try:
                process.wait(stop_timeout)
            except subprocess.TimeoutExpired:
                process.kill()
    if process.returncode != 0:
        raise UnavailableError(f"the cluster ended with exit code {process.returncode}; its messages are above")


def _wait_until_ready(process: subprocess.Popen[str]) -> ClusterAddress:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise UnavailableError("the cluster ended before it was ready; its messages are above")
    ready = json.loads(line)
    return ClusterAddress(ready["http_address"], ready["grpc_address"], ready["model"], process.pid)
