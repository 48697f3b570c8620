"""What UCX and ucxx read from the environment when they are loaded, and from nowhere else: how they log.

Invariant: a variable that is set already keeps its value.
"""

import os

_VARIABLES = {
    # ucxx sets variables of its own, and UCX warns about those that it does not use.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # UCX logs to standard output, where a node announces that it is ready.
    "UCX_LOG_FILE": "stderr",
    # UCX and both layers of ucxx log an error when a peer dies or cannot be reached. For us that is none: whoever waits
    # for the peer is told.
    "UCX_LOG_LEVEL": "FATAL",
    "UCXX_LOG_LEVEL": "FATAL",
    "UCXPY_LOG_LEVEL": "CRITICAL",
}


def prepare_ucx_environment() -> None:
    """Sets the variables for this process and its children. Has to be called before ucxx is imported, which
    `transport.py` does; later it has no effect."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
