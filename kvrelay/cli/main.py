"""`kvrelay COMMAND ...`: finds the command and hands it the rest of the arguments, from which it loads its settings.

`router`, `prefill` and `decode` replace this process by the one that they name, so that signals reach it directly.
"""

import errno
import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from kvrelay import __version__
from kvrelay.core.process.interruptible import exit_with, interruptible_imports

Command = Callable[[Sequence[str]], int]

PROCESS_MODULES = {"router": "router", "prefill": "prefill_node", "decode": "decode_node"}
# Imported only when they are called, so that `kvrelay --version` does not load gRPC.
COMMANDS = {
    "serve": "kvrelay.cli.serve:serve",
    "complete": "kvrelay.cli.client:complete",
    "chat": "kvrelay.cli.client:chat",
    "status": "kvrelay.cli.client:status",
    "bench": "kvrelay.bench.command:bench",
}

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

USAGE = """\
usage: kvrelay COMMAND ...        `kvrelay COMMAND --help` explains a command and its settings

A whole cluster on this machine:
  serve MODEL         start nodes and a router, end them together

One process each, for nodes on several machines:
  prefill MODEL       a prefill node: prompts in, KV blocks and first tokens out
  decode MODEL        a decode node: KV blocks in, tokens out
  router MODEL        the router: gRPC and HTTP for clients, a list of nodes behind it

Talk to a running router:
  complete PROMPT     continue a text
  chat [MESSAGE]      ask once, or converse when there is no message
  status              what it serves and whether it is healthy

Measure any OpenAI-compatible or kvrelay server:
  bench               serve, latency, throughput or sweep

  --version, --help
"""


def main() -> None:
    """Runs the console script."""
    _open_standard_streams()
    try:
        try:
            exit_with(lambda: run(sys.argv[1:]))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output is gone (`kvrelay complete ... | head`)
        _end_without_output(141)
    except OSError as error:
        if error.errno not in _NO_ROOM or error.filename is not None:  # it is about another file
            raise
        with suppress(OSError):  # standard error may be on the same disk
            print(f"kvrelay: cannot write the output: {error.strerror}", file=sys.stderr)
        _end_without_output(1)


def _end_without_output(status: int) -> NoReturn:
    """Ends the process. What is still to be written would be tried again at the end, and fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)


def _open_standard_streams() -> None:
    """Opens /dev/null in place of standard streams that are closed (`<&-`). A connection would get the number of one,
    and uvloop aborts the process that closes it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.set_inheritable(number, True)  # for the process that replaces this one
            setattr(sys, name, os.fdopen(number, mode))


def run(argv: Sequence[str]) -> int:
    """Runs one command line, which comes without the program's name, and returns its exit status."""
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] in ("--version", "version"):
        print(f"kvrelay {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name in PROCESS_MODULES:
        _become(PROCESS_MODULES[name], rest)
    if name not in COMMANDS:
        known = ", ".join([*PROCESS_MODULES, *COMMANDS])
        print(f"kvrelay: there is no command {name!r}; there are {known}. Try `kvrelay --help`.", file=sys.stderr)
        return 2
    with interruptible_imports():
        command: Command = pkgutil.resolve_name(COMMANDS[name])
    return command(rest)


def _become(module: str, argv: Sequence[str]) -> NoReturn:
    """Replaces this process. `-P` ignores a folder of the module's name in the working directory."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *argv])
