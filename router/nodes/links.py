"""Which prefill nodes' KV gets to a decode node. A router may reach two nodes that do not reach each other; then one of
them computes prompts for the other in vain.

Invariant: a link over which KV gets through is used. One that failed several times in a row, that is, brought nothing
or broke off, is left alone for a while, and then tried by one prompt at a time.
"""

from random import Random

from kvrelay.core.breaker import Permit
from kvrelay.core.clock import Clock
from kvrelay.core.kv.source import KVSource
from kvrelay.core.kv.source_breakers import SourceBreakers
from kvrelay.core.node_report import STORE, FetchReport
from kvrelay.core.outages import Outages


class Links:
    """The links from prefill nodes to one decode node. `random` draws for how long they are left alone."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self._breakers = SourceBreakers(clock, random=random)
        self._outages = Outages(clock.now)

    def failing(self) -> list[KVSource]:
        """Returns the prefill nodes that are left alone or tried again, since their KV did not get here. They may
        have ended meanwhile."""
        return self._breakers.open()

    def broken(self) -> list[KVSource]:
        """Returns those of `failing` that are left alone now, or are being tried by a prompt already."""
        return self._breakers.refusing()

    def begin(self, source: KVSource, reader: str) -> "Delivery":
        """Returns the delivery of a prompt's KV by `source`. `reader` is the decode node's id, for the log."""
        name = f"moving KV from {source.node_id} to {reader}"
        return Delivery(self._breakers, self._outages, source, name, self._breakers.admit(source))


class Delivery:
    """A prompt's KV on its way from `source`. The owner calls `settle` when it knows what has arrived, and `close` in
    any case; only the first call counts. `permit` is None if the link was left alone already, so that it says nothing
    new if nothing comes."""

    def __init__(
        self, breakers: SourceBreakers, outages: Outages, source: KVSource, name: str, permit: Permit | None
    ) -> None:
        self._breakers = breakers
        self._outages = outages
        self._source = source
        self._name = name
        self._permit = permit
        self._is_over = False

    def settle(self, fetches: FetchReport, *, lacks_blocks: bool) -> None:
        """Takes note of what the decode node has fetched. `lacks_blocks`: not all that `source` should have sent. A
        link that brings a part and breaks off costs each prompt as much time as one that brings nothing; blocks that
        were evicted or damaged say nothing against it."""
        if self._is_over:
            return
        origin = STORE if self._source.is_store_only else self._source.node_id
        broke_off = lacks_blocks and fetches.num_failed > 0  # perhaps from another holder, hardly three times in a row
        if not broke_off and any(node_id == origin for node_id, _ in fetches.fetched):
            self._is_over = True
            self._breakers.succeeded(self._source)
            self._outages.succeeded(self._name)
        elif lacks_blocks and self._permit is not None:
            self._is_over = True
            self._breakers.failed(self._source, self._permit)
            if self._source in self._breakers.open():
                message = "%s failed several times in a row; another prefill node is preferred, if there is one"
                self._outages.failed(self._name, message, self._name)
        else:
            self.close()

    def close(self) -> None:
        if not self._is_over and self._permit is not None:
            self._breakers.abandoned(self._source, self._permit)
        self._is_over = True
