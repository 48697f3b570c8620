"""The command of a node, `kvrelay prefill` or `kvrelay decode`: it reads the settings, and then imports the engine.

So help, and what is wrong with a setting, do not take seconds.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvrelay.core.process.extras import ENGINE_MODULES, require_extra
from kvrelay.core.process.interruptible import interruptible_imports

if TYPE_CHECKING:
    from kvrelay.node.node import Node
    from kvrelay.node.server import Service


def run_node(role: str, import_service: "Callable[[], Callable[[Node], Service]]") -> int:
    """Runs a node as the arguments say until it is told to stop; returns the exit status. `import_service` imports the
    class of its service, which brings the engine with it, and returns it."""
    with interruptible_imports():
        from kvrelay.core.config.settings import load_settings
        from kvrelay.node.settings import SETTINGS_OF_ROLE

    settings = load_settings(SETTINGS_OF_ROLE[role], sys.argv[1:], prog=f"kvrelay {role}")
    require_extra("engine", ENGINE_MODULES, purpose=f"a {role} node")
    with interruptible_imports():
        from kvrelay.node.process import main

        make_service = import_service()
    return main(role, make_service, settings)
