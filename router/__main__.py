"""`python -m router MODEL`: one router."""

import sys

from kvrelay.core.process.interruptible import exit_with, interruptible_imports


def run() -> int:
    with interruptible_imports():
        from router.app import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    exit_with(run)
