"""`python -m prefill_node MODEL`: one prefill node."""

import sys

from kvrelay.core.extras import ENGINE_MODULES, require_extra
from kvrelay.core.interruptible import exit_with, interruptible_imports


def run() -> int:
    require_extra("engine", ENGINE_MODULES, purpose="a prefill node")
    with interruptible_imports():
        from kvrelay.node.process import main
        from prefill_node.service import PrefillService

    return main("prefill", PrefillService, sys.argv[1:])


if __name__ == "__main__":
    exit_with(run)
