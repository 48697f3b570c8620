"""`python -m prefill_node MODEL`: one prefill node."""

import sys

from kvrelay.core.extras import ENGINE_MODULES, require_extra
from kvrelay.core.interruptible import INTERRUPTED, interruptible_imports


def run() -> int:
    require_extra("engine", ENGINE_MODULES, purpose="a prefill node")
    with interruptible_imports():
        from kvrelay.node.process import main
        from prefill_node.service import PrefillService

    return main("prefill", PrefillService, sys.argv[1:])


if __name__ == "__main__":
    try:
        sys.exit(run())
    except KeyboardInterrupt:  # before it takes signals as a wish to stop
        sys.exit(INTERRUPTED)
