"""Makes text of others, such as a server's, safe for a person's terminal."""

import io
import sys


def printable(text: str) -> str:
    """Returns text of a server, such as its errors, with `?` for control characters, which could have the terminal
    overwrite what it shows, or do more. Lines and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)


def replace_what_it_lacks() -> None:
    """From now on, a character that the terminal lacks appears as `?` on standard output, in place of an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
