"""`python -m prefill_node MODEL`: one prefill node."""

from typing import TYPE_CHECKING

from kvrelay.core.process.interruptible import exit_with
from kvrelay.node.command import run_node

if TYPE_CHECKING:
    from prefill_node.service import PrefillService


def run() -> int:
    return run_node("prefill", _service)


def _service() -> "type[PrefillService]":
    from prefill_node.service import PrefillService

    return PrefillService


if __name__ == "__main__":
    exit_with(run)
