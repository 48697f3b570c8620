"""The blocks that a prefill node computes for the decode node D of an attempt: D is told of them as they are published.
Where the outputs end with their first tokens there is no D, and nobody is told.

Invariant: once a supply is closed, its prefill is over and its lease released, what the link to D has shown is noted,
and the node's counts are as without it. Nothing here waits.
"""

from kvrelay.core.errors import KVRelayError
from kvrelay.core.node_report import FetchReport
from router.nodes.links import Delivery
from router.relay.charge import Charge
from router.relay.decode_client import DecodeSession
from router.relay.prefill_client import PrefillSession, Sink
from router.relay.resolved_placement import PrefillPlacement
from router.request import NodeRequest


class Supply:
    """The supply by one node: the owner calls `open`, then tells it what the events say, then `close`. `session` is
    that of D, and `delivery` that of the blocks to it; both are None without D."""

    def __init__(self, placement: PrefillPlacement, session: DecodeSession | None, delivery: Delivery | None) -> None:
        self.num_published_blocks = 0
        self._placement = placement
        self._session = session
        self._delivery = delivery
        self._charge = Charge(placement)
        self._prefilling: PrefillSession | None = None

    def open(self, wire_id: str, node_request: NodeRequest, *, timeout: float, sink: Sink) -> None:
        """Starts the prefill as `PrefillClient.prefill` does."""
        self._charge.begin()
        placement = self._placement
        self._prefilling = placement.client.prefill(
            wire_id, node_request, placement.sources, epoch=placement.source.epoch, timeout=timeout, sink=sink
        )

    def published(self, num_blocks: int) -> None:
        """Notes that the first `num_blocks` blocks can be fetched."""
        self.num_published_blocks = num_blocks
        self._pull(ended=False)

    def computed(self) -> None:
        """Notes that the prompt is computed."""
        self._charge.end()
        self._placement.node.succeeded(self._placement.source)

    def ended(self, error: KVRelayError | None) -> None:
        """Notes that the node will publish no more, because of an error or because it has published what it could."""
        if error is not None:
            self._placement.node.failed(error, self._placement.source)
        self._charge.end()
        self._pull(ended=True)

    def settle(self, fetches: FetchReport, *, lacks_blocks: bool) -> None:
        """Notes what D has fetched; see `Delivery.settle`."""
        if self._delivery is not None:
            self._delivery.settle(fetches, lacks_blocks=lacks_blocks)

    def release(self) -> None:
        """Releases the lease, because D has its blocks. Idempotent."""
        if self._prefilling is not None:
            self._prefilling.release()

    def close(self) -> None:
        """Ends the prefill. Must be called however the attempt ends. Idempotent."""
        self._charge.end()
        if self._delivery is not None:
            self._delivery.close()
        if self._prefilling is not None:
            self._prefilling.close()

    def _pull(self, *, ended: bool) -> None:
        if self._session is not None:
            self._session.pull(self._placement.source, self.num_published_blocks, ended=ended)
