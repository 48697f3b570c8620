"""`python -m router MODEL`: one router."""

import sys


def run() -> int:
    from router.app import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    try:
        sys.exit(run())
    except KeyboardInterrupt:  # while it still imports; later it is a signal to stop
        sys.exit(130)
