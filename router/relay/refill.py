"""A second prefill, on another node, of blocks that an attempt's decode node D waits for: they did not arrive from the
first prefill node, and no other node has them.

The same tokens make the same blocks, so D fetches them under the same names. The first token is one that the client
already has; it is ignored. Invariant: once a refill is closed, so is its supply. Nothing here waits.
"""

import logging
from dataclasses import replace

from kvrelay.core.node_report import NOTHING_FETCHED, FetchReport
from router.relay.prefill_client import (
    PrefillEnded,
    PrefillEvent,
    PrefillFinished,
    PrefillProgress,
    Sink,
)
from router.relay.resolved_placement import PrefillPlacement
from router.relay.supply import Supply
from router.relay.tally import Tally
from router.request import NodeRequest

_logger = logging.getLogger(__name__)


def blocks_only(node_request: NodeRequest) -> NodeRequest:
    """Returns what a refill asks for: one output, because there has to be one, and no log-probabilities. For those of
    the prompt, it would have to compute what is held somewhere."""
    sampling = replace(node_request.sampling, n=1, logprobs=None, prompt_logprobs=None)
    return replace(node_request, sampling=sampling)


class Refill:
    """One refill: the owner calls `open`, then `take` with each event that the sink is given, then `close`.
    `node_request` is one of `blocks_only`, and `supply` that of the node of `placement`. `over`: the node will announce
    no more blocks."""

    def __init__(
        self,
        node_request: NodeRequest,
        wire_id: str,
        placement: PrefillPlacement,
        supply: Supply,
        tally: Tally,
    ) -> None:
        self.over = False
        self.placement = placement
        self._node_request = node_request
        self._wire_id = wire_id
        self._supply = supply
        self._tally = tally
        self._has_finished = False
        self._is_enough = False

    def open(self, sink: Sink, *, timeout: float) -> None:
        self._supply.open(self._wire_id, self._node_request, timeout=timeout, sink=sink)

    def take(self, event: PrefillEvent) -> None:
        match event:
            case PrefillProgress(num_published_blocks):
                self._supply.published(num_published_blocks)
            case PrefillFinished():
                self._has_finished = True
                self._supply.computed()
                self._tally.refilled(
                    self._node_request,
                    num_cached_tokens=event.num_cached_tokens,
                    fetches=event.fetches,
                )
                if self._is_enough:
                    self.close()
            case PrefillEnded(error):
                if error is not None:
                    _logger.warning("request %s: the prefill node failed: %s", self._wire_id, error)
                self.over = True
                self._supply.ended(error)

    @property
    def _has_published_all(self) -> bool:
        return self._supply.num_published_blocks >= self._tally.num_blocks(len(self._node_request.token_ids))

    def enough(self, fetches: FetchReport, *, lacks_blocks: bool) -> None:
        """Closes the refill because D, which has fetched these blocks and `lacks_blocks` or not, needs no more, unless
        the node has published everything. Then it is about to finish, and its last event says how many tokens it has
        computed. If the request ends before that event, `close` counts the tokens that were expected."""
        self._supply.settle(fetches, lacks_blocks=lacks_blocks and self._supply.num_published_blocks > 0)
        self._is_enough = True
        if self._has_finished or not self._has_published_all:
            self.close()

    def close(self) -> None:
        """Ends the prefill. Must be called however the attempt ends. Idempotent."""
        self.over = True
        self._supply.close()
        if self._is_enough and self._has_published_all and not self._has_finished:
            self._has_finished = True
            num_found_tokens = len(self._node_request.token_ids) - self.placement.num_uncached_tokens
            self._tally.refilled(self._node_request, num_cached_tokens=num_found_tokens, fetches=NOTHING_FETCHED)
