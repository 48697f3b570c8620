"""Ports for servers that cannot draw one themselves, because others have to know it before, or after they have died."""

import random
import socket
from contextlib import suppress

# The kernel does not hand these out, so that nobody takes one before or between its uses.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    """Returns a port of the loopback interface on which nobody listens now."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
