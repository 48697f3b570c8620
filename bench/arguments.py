"""What the command lines of benchmark scripts share: a parser, an argument and its type, and an environment without
kvrelay's settings."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from kvrelay.core.config.fields import ENV_PREFIX
from kvrelay.core.process.cgroup import available_cores


class _Help(argparse.RawDescriptionHelpFormatter):
    """The format of `--help`: every option has its default, unless its text speaks of that by itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        said, default = action.help or "", action.default
        is_unset = default in (None, "") or default is False or default is argparse.SUPPRESS
        if is_unset or not action.option_strings or "default" in said:
            return said
        shown = shlex.join(map(str, default)) if isinstance(default, list | tuple) else default
        return f"{said} (default: {shown})"


def script_parser(file: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of the script in `file`, which is run as `python -m bench.NAME`, and drops kvrelay's settings
    from the environment."""
    drop_settings()
    return argparse.ArgumentParser(
        prog=f"python -m bench.{Path(file).stem}", description=description, formatter_class=_Help
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Adds `--threads` to the parser of a script that computes in its own process."""
    text = "CPU threads; default: one for each core that this process may use"
    parser.add_argument("--threads", type=positive, default=available_cores(), help=text)


def drop_settings(*others: str) -> None:
    """Removes kvrelay's settings, and variables that begin with one of `others`, from the environment, with a note for
    each: what a benchmark starts, and the loads that it makes, would have them, and not be what it says that they
    are."""
    for variable in sorted(variable for variable in os.environ if variable.startswith((ENV_PREFIX, *others))):
        print(f"note: the variable {variable} is not a setting of benchmarks; ignored", file=sys.stderr)
        del os.environ[variable]


def positive(text: str) -> int:
    """Parses a whole number of at least 1. Raises ArgumentTypeError, whose message argparse shows."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number of at least 1")
    return int(text)
