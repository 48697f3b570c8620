"""`python -m decode_node MODEL`: one decode node."""

from typing import TYPE_CHECKING

from kvrelay.core.process.interruptible import exit_with
from kvrelay.node.command import run_node

if TYPE_CHECKING:
    from decode_node.service import DecodeService


def run() -> int:
    return run_node("decode", _service)


def _service() -> "type[DecodeService]":
    from decode_node.service import DecodeService

    return DecodeService


if __name__ == "__main__":
    exit_with(run)
