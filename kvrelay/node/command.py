"""The command of a node, `kvrelay prefill` or `kvrelay decode`: it reads the settings, and then imports the engine.

So help, and what is wrong with a setting, do not take seconds.
"""

import pkgutil
import sys

from kvrelay.core.process.extras import ENGINE_MODULES, require_extra
from kvrelay.core.process.interruptible import interruptible_imports


def run_node(command: str, service_name: str) -> int:
    """Runs the node of `kvrelay COMMAND` as the arguments say until it is told to stop; returns the exit status.
    `service_name`, `module:class`, is imported last: it brings the engine with it."""
    with interruptible_imports():
        from kvrelay.core.config.settings import load_settings
        from kvrelay.node.settings import SETTINGS_OF_COMMAND

    settings = load_settings(SETTINGS_OF_COMMAND[command], sys.argv[1:], prog=f"kvrelay {command}")
    require_extra("engine", ENGINE_MODULES, purpose=f"a {command} node")
    with interruptible_imports():
        from kvrelay.node.process import main

        service = pkgutil.resolve_name(service_name)
    return main(service, settings)
