"""`python -m prefill_node MODEL`: one prefill node."""

import sys

from kvrelay.core.extras import ENGINE_MODULES, require_extra


def run() -> int:
    require_extra("engine", ENGINE_MODULES, purpose="a prefill node")
    from kvrelay.node.process import main
    from prefill_node.service import PrefillService

    return main("prefill", PrefillService, sys.argv[1:])


if __name__ == "__main__":
    try:
        sys.exit(run())
    except KeyboardInterrupt:  # while it still imports; later it is a signal to stop
        sys.exit(130)
