"""Which KV each name stands for that nodes may give to a block of these requests, computed without a cluster."""

from collections.abc import Iterable, Mapping

from kvrelay.core.kv.block_hash import BlockHash, next_block_hash
from router.request import RoutedRequest
from tests.simulation.node_config import BLOCK_SIZE
from tests.simulation.oracle import SLOT_BYTES, expected_output, slots_of
from tests.simulation.running_node import NAMESPACE


def kv_by_name(requests: Iterable[RoutedRequest]) -> Mapping[BlockHash, bytes]:
    """Returns the KV of all full blocks, and of all partial ones, since a replay may begin after any token."""
    found: dict[BlockHash, bytes] = {}
    for request in requests:
        for index in range(request.sampling.n):
            output = expected_output(request.prompt_token_ids, request.sampling, index)
            _add(found, NAMESPACE.root(cache_salt=request.cache_salt), request.prompt_token_ids + output.token_ids)
    return found


def _add(found: dict[BlockHash, bytes], parent: BlockHash, token_ids: tuple[int, ...]) -> None:
    slots = slots_of(token_ids)
    for start in range(0, len(token_ids), BLOCK_SIZE):
        name = parent
        for end in range(start + 1, min(start + BLOCK_SIZE, len(token_ids)) + 1):
            name = next_block_hash(parent, token_ids[start:end])
            found[name] = slots[start * SLOT_BYTES : end * SLOT_BYTES]
        parent = name
