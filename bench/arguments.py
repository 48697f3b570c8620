"""Types of arguments that benchmark scripts share."""

import argparse


def positive(text: str) -> int:
    """Parses a whole number of at least 1. Raises ArgumentTypeError, whose message argparse shows."""
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number of at least 1")
    return int(text)
