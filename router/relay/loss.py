"""How an attempt to serve outputs loses a node: the error that ends it, and the point that the request had reached."""

from enum import Enum

from kvrelay.core.errors import KVRelayError, NotFiniteError, NotTakenError, UnavailableError
from router.relay.recovery_metrics import MigrationCause
from router.relay.resolved_placement import DecodePlacement, PrefillPlacement


class Loss(Enum):
    """How an attempt lost a node. That a prefill node is lost after its first token does not count: the request goes
    on."""

    PREFILLING = "prefill node before its first token"
    WAITING = "decode node before the prefill node's first token"
    DECODING = "decode node that had the first token or was to compute it"

    @property
    def cause(self) -> MigrationCause:
        """Returns the label in metrics."""
        return "prefill_node_lost" if self is Loss.PREFILLING else "decode_node_lost"


class NodeLostError(UnavailableError):
    """An attempt failed because of one node; another attempt without this node may succeed. `was_taken`: the node may
    have taken the request, which then may be what ends it. `doubts_kv`: the blocks that nodes hold of the request may
    be why, and one that was told so may not have heard it yet."""

    def __init__(self, node: DecodePlacement | PrefillPlacement, loss: Loss, error: KVRelayError) -> None:
        super().__init__(str(error))
        self.source = node.source
        self.loss = loss
        self.was_taken = not isinstance(error, NotTakenError)
        self.doubts_kv = isinstance(error, NotFiniteError)
