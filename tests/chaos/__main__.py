"""`python -m tests.chaos`: faults on real processes, for each connector in turn. The exit status is 1 if a run fails.

Progress and readable reports go to standard error, and all reports as one JSON array to standard output.
"""

import argparse
import asyncio
import dataclasses
import json
import logging
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos.nodes import CONNECTORS
from tests.chaos.report import Report
from tests.chaos.run import Plan, run_chaos, run_rolling_restart, run_soak, run_storm

_logger = logging.getLogger("chaos")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--connector", choices=CONNECTORS, help="run only this connector (default: all in turn)")
    parser.add_argument(
        "--seconds", type=float, default=180.0, help="duration per connector, but not of the storm or restarts (180)"
    )
    parser.add_argument("--seed", type=int, default=1, help="decides requests and faults (1)")
    parser.add_argument("--streams", type=int, default=10, help="concurrent clients (10)")
    parser.add_argument("--storm", type=int, default=0, help="instead of faults: so many requests whose clients leave")
    parser.add_argument("--rolling-restart", action="store_true", help="instead of faults: restart every node in turn")
    parser.add_argument("--soak", action="store_true", help="instead of faults: watch what all processes hold")
    parser.add_argument("--keep-logs", action="store_true", help="keep the logs of the processes even when all is well")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # so that no stopped process is left
    connectors = [options.connector] if options.connector else CONNECTORS
    reports = [_run(connector, options) for connector in connectors]
    json.dump([dataclasses.asdict(report) for report in reports], sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 1 if any(report.violations for report in reports) else 0


def _run(connector: str, options: argparse.Namespace) -> Report:
    plan = Plan(connector, options.seed, seconds=options.seconds, num_streams=options.streams)
    directory = Path(tempfile.mkdtemp(prefix="kvrelay-chaos-"))
    if options.storm:
        report = asyncio.run(run_storm(plan, options.storm, directory))
    elif options.rolling_restart:
        report = asyncio.run(run_rolling_restart(plan, directory))
    elif options.soak:
        report = asyncio.run(run_soak(plan, directory))
    else:
        report = asyncio.run(run_chaos(plan, directory))
    _logger.info("%s", report.readable())
    if report.violations or options.keep_logs:
        _logger.info("  the logs of all processes are in %s", directory)
    else:
        shutil.rmtree(directory)
    return report


if __name__ == "__main__":
    sys.exit(main())
