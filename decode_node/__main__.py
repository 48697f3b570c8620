"""`python -m decode_node MODEL`: one decode node."""

import sys

from kvrelay.core.extras import ENGINE_MODULES, require_extra


def run() -> int:
    require_extra("engine", ENGINE_MODULES, purpose="a decode node")
    from decode_node.service import DecodeService
    from kvrelay.node.process import main

    return main("decode", DecodeService, sys.argv[1:])


if __name__ == "__main__":
    try:
        sys.exit(run())
    except KeyboardInterrupt:  # while it still imports; later it is a signal to stop
        sys.exit(130)
