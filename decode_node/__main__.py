"""`python -m decode_node MODEL`: one decode node."""

import sys

from kvrelay.core.extras import ENGINE_MODULES, require_extra
from kvrelay.core.interruptible import exit_with, interruptible_imports


def run() -> int:
    with interruptible_imports():
        from kvrelay.core.config import load_settings
        from kvrelay.node.settings import NodeSettings

    # Before the engine is imported: help, and what is wrong with a setting, do not take seconds.
    settings = load_settings(NodeSettings, sys.argv[1:], prog="kvrelay decode")
    require_extra("engine", ENGINE_MODULES, purpose="a decode node")
    with interruptible_imports():
        from decode_node.service import DecodeService
        from kvrelay.node.process import main

    return main("decode", DecodeService, settings)


if __name__ == "__main__":
    exit_with(run)
