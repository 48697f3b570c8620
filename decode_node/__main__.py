"""`python -m decode_node MODEL`: one decode node."""

from kvrelay.core.process.interruptible import exit_with
from kvrelay.node.command import run_node


def run() -> int:
    return run_node("decode", "decode_node.service:DecodeService")


if __name__ == "__main__":
    exit_with(run)
