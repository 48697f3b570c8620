"""`python -m prefill_node MODEL`: one prefill node."""

from kvrelay.core.process.interruptible import exit_with
from kvrelay.node.command import run_node


def run() -> int:
    return run_node("prefill", "prefill_node.service:PrefillService")


if __name__ == "__main__":
    exit_with(run)
