"""`python -m router MODEL`: one router."""

import sys

from kvrelay.core.interruptible import INTERRUPTED, interruptible_imports


def run() -> int:
    with interruptible_imports():
        from router.app import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    try:
        sys.exit(run())
    except KeyboardInterrupt:  # before it takes signals as a wish to stop
        sys.exit(INTERRUPTED)
