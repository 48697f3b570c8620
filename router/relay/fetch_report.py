"""What a node fetched for a request, as it reports it to the router."""

from dataclasses import dataclass

from kvrelay.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class FetchReport:
    """`fetched`: (node id, or "" for the store that all nodes share; blocks). The counts are of blocks that were asked
    for in vain: the source did not have them, they did not verify, it could not be reached in time."""

    fetched: tuple[tuple[str, int], ...] = ()
    num_missing: int = 0
    num_refused: int = 0
    num_failed: int = 0


NO_FETCHES = FetchReport()


def report_from_wire(message: common_pb2.FetchReport) -> FetchReport:
    return FetchReport(
        tuple((entry.node_id, entry.num_blocks) for entry in message.fetched),
        num_missing=message.num_missing,
        num_refused=message.num_refused,
        num_failed=message.num_failed,
    )
