"""`kvrelay serve` as a child process of a program (demo, benchmarks, tests). Leaving the context ends the cluster.

Invariant: the cluster ends with the caller, even when that is killed (`--supervised`).
"""

import json
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvrelay.core.errors import UnavailableError

_STOP_SECONDS = 60.0  # after which it is killed


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """The addresses of a running cluster, each `host:port`, the name of its model, and the process id of its `kvrelay
    serve`, from which all its processes descend."""

    http: str
    grpc: str
    model: str
    process: int


@contextmanager
def local_cluster(
    model: str, arguments: Sequence[str] = (), *, start_timeout: float = 2000.0
) -> Iterator[ClusterAddress]:
    """Starts a cluster on free ports and yields its addresses when it is ready. `arguments` are further arguments of
    `kvrelay serve`; its log goes to our standard error.

    The default of `start_timeout`, in seconds, is more than what `kvrelay serve` itself allows its nodes and then its
    router, whose error says more. Raises UnavailableError when the cluster is not ready in time, ends before it is
    ready, or ends with an error.
    """
    command = [sys.executable, "-P", "-m", "kvrelay", "serve", model]
    command += ["--port", "0", "--grpc-port", "0", "--json-ready", "--supervised", *arguments]
    # In a session of its own: a terminal's Ctrl-C reaches only us, and what we then send is not its second signal.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:  # waits, and closes the pipes
        try:
            yield _wait_until_ready(process, start_timeout)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
    if process.returncode != 0:
        raise UnavailableError(f"the cluster ended with exit code {process.returncode}; its messages are above")


def _wait_until_ready(process: subprocess.Popen[str], timeout: float) -> ClusterAddress:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout)
    if not readable:
        raise UnavailableError(f"the cluster was not ready after {timeout:g} seconds; its messages are above")
    line = process.stdout.readline()
    if not line:
        raise UnavailableError("the cluster ended before it was ready; its messages are above")
    ready = json.loads(line)
    return ClusterAddress(ready["http_address"], ready["grpc_address"], ready["model"], process.pid)
