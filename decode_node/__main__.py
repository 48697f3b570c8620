"""`python -m decode_node MODEL`: one decode node."""

import sys

from kvrelay.core.extras import ENGINE_MODULES, require_extra
from kvrelay.core.interruptible import exit_with, interruptible_imports


def run() -> int:
    require_extra("engine", ENGINE_MODULES, purpose="a decode node")
    with interruptible_imports():
        from decode_node.service import DecodeService
        from kvrelay.node.process import main

    return main("decode", DecodeService, sys.argv[1:])


if __name__ == "__main__":
    exit_with(run)
