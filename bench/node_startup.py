"""How long a decode node takes from the start of its process until it is ready.

    python -m bench.node_startup DIR [--runs 5] [--threads 2]

Starts `kvrelay decode` on a model several times, one after the other, and reads the line that it prints when it is
ready. The first start does not count (`--warmup`): it may have to read the model's files from the disk.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.arguments import positive, script_parser
from bench.child import child
from bench.figures import Figure, add_json_file, write_figures
from bench.python_speed import python_speed
from kvrelay.core.errors import KVRelayError


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__file__, __doc__)
    parser.add_argument("model", metavar="DIR", help="directory of the model")
    parser.add_argument("--runs", type=positive, default=5, help="starts of which the median is printed")
    parser.add_argument("--warmup", type=int, default=1, help="starts before these that do not count")
    parser.add_argument("--threads", type=positive, help="CPU threads of the node; default: the node's own default")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that a start may take")
    add_json_file(parser)
    arguments = parser.parse_args(argv)
    if arguments.warmup < 0:
        parser.error("--warmup must be at least 0")
    if not (Path(arguments.model) / "config.json").is_file():
        parser.error(f"there is no config.json in {arguments.model}: give the directory of a model")
    node = ["-m", "kvrelay", "decode", arguments.model, "--port", "0", "--supervised", "--log-level", "warning"]
    if arguments.threads is not None:
        node += ["--threads", str(arguments.threads)]
    print(python_speed(), flush=True)
    try:
        starts = [start_seconds(node, arguments.timeout) for _ in range(arguments.warmup + arguments.runs)]
    except KVRelayError as error:
        sys.exit(f"bench.node_startup: {error}")
    seconds = starts[arguments.warmup :]
    print(
        f"{Path(arguments.model).name}: ready after {statistics.median(seconds):.2f} s (median of {len(seconds)}; "
        f"{min(seconds):.2f} to {max(seconds):.2f})"
    )
    write_figures(arguments.json_file, [Figure("ready after", statistics.median(seconds), "s")])


def start_seconds(arguments: Sequence[str], timeout: float) -> float:
    """Starts a node, ends it again, and returns the seconds until it was ready. Raises UnavailableError when it is not
    ready within `timeout` seconds."""
    started = time.perf_counter()
    with child("the decode node", arguments) as node:
        ready = json.loads(node.read_line(timeout))
        seconds = time.perf_counter() - started
    assert ready["event"] == "ready"
    return seconds


if __name__ == "__main__":
    main()
