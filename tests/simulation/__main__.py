"""`python -m tests.simulation --seeds 0:1000` runs many seeds; `--seed N --trace` replays one, event by event."""

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter

from tests.simulation.seeds import run_seed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument(
        "--seeds", type=_seeds, default="0:200", metavar="FIRST:LAST", help="the last one excluded (%(default)s)"
    )
    parser.add_argument("--trace", action="store_true", help="print every event")
    options = parser.parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of names is part of a run
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *arguments], _fixed_hashes())
    logging.getLogger().setLevel(logging.DEBUG if options.trace else logging.CRITICAL + 1)
    seeds = options.seeds if options.seed is None else range(options.seed, options.seed + 1)
    gc.collect()
    gc.freeze()  # so that collecting after each run looks at what that run has made only
    counts: Counter[str] = Counter()
    failed = []
    started = time.monotonic()
    for seed in seeds:
        outcome = run_seed(seed, traced=options.trace)
        counts += outcome.counts
        for event in outcome.events:
            print(event)
        if outcome.failures:
            failed.append(seed)
            print(f"seed {seed} fails:", *outcome.failures[:20], sep="\n    ", flush=True)
    if options.seed is None:
        print(
            f"{len(seeds)} seeds in {time.monotonic() - started:.1f} s:",
            ", ".join(f"{n} {k}" for k, n in sorted(counts.items())),
        )
    elif not failed:
        print(f"seed {options.seed} passes")
    if failed:
        print("failing seeds:", *failed)
    return 1 if failed else 0


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIRST:LAST with at least one seed")
    return range(int(first), int(last))


def _fixed_hashes() -> dict[str, str]:
    return {**os.environ, "PYTHONHASHSEED": "0"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
