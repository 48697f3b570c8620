"""The router's core: admits requests, and runs the supervisor of each until it has ended.

Invariant: there are at most `max_concurrent_requests` supervisors, one per request id, and none outlives its generator.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from random import Random, SystemRandom

from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import InvalidRequestError, OverloadedError, UnavailableError
from kvrelay.core.turns import OneAtATime
from router.nodes.registry import Registry
from router.relay.inbox import Inboxes
from router.relay.limits import RelayLimits
from router.relay.placer import Placer
from router.relay.recovery_metrics import RecoveryMetrics
from router.relay.supervisor import Reaction, RequestSupervisor
from router.relay.tally import Tally
from router.request import RequestEvent, RoutedRequest, ServedModel

_logger = logging.getLogger(__name__)
_ABORT_SECONDS = 1.0  # for consumers to take the errors of requests that a stop has aborted


class ClusterRelay:
    """Implements `Relay` over the nodes of a registry. It owns `placer`, but not the registry. `random` spreads
    retries, and draws the part of wire ids that tells this router's requests from those of others."""

    def __init__(
        self,
        registry: Registry,
        placer: Placer,
        limits: RelayLimits,
        metrics: RecoveryMetrics,
        *,
        clock: Clock | None = None,
        random: Random | None = None,
    ) -> None:
        self._registry = registry
        self._placer = placer
        self._limits = limits
        self._metrics = metrics
        self._clock = clock or MonotonicClock()
        self._random = random or SystemRandom()
        for node in registry.decode:
            node.on_live = self._decode_node_came
        self._running: dict[str, RequestSupervisor] = {}
        self._inboxes: Inboxes[Reaction] = Inboxes()
        self._replays = OneAtATime()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._wire_numbers = itertools.count()
        # Clients choose request ids. At the nodes the ids must be unique over all routers and over time.
        self._tag = f"{self._random.getrandbits(32):08x}"

    def served_model(self) -> ServedModel:
        if self._draining:
            raise UnavailableError("the router is stopping")
        return self._registry.served_model()

    def check_capacity(self, num_admitting: int = 0, num_wanted: int = 1) -> None:
        limit = self._limits.max_concurrent_requests
        if num_wanted > limit:
            raise InvalidRequestError(
                f"prompt has {num_wanted} entries, more than the {limit} requests that may run at a time; send fewer",
                field="prompt",
            )
        if len(self._running) + num_admitting + num_wanted > limit:
            raise OverloadedError(f"{limit} requests are running or waiting, which is all that may; try again later")

    async def run(self, request: RoutedRequest) -> AsyncGenerator[RequestEvent, None]:
        if self._draining:
            raise UnavailableError("the router is stopping")
        if request.request_id in self._running:
            raise InvalidRequestError(f"a request {request.request_id!r} is running already", field="request_id")
        self.check_capacity()
        supervisor = self._running[request.request_id] = self._supervisor(request)
        self._idle.clear()
        try:
            async with aclosing(supervisor.run()) as events:
                async for event in events:
                    yield event
        finally:
            del self._running[request.request_id]
            if not self._running:
                self._idle.set()

    def finish(self, request_id: str, index: int) -> None:
        supervisor = self._running.get(request_id)
        if supervisor is not None:
            supervisor.finish(index)

    def abort(self, request_id: str) -> None:
        supervisor = self._running.get(request_id)
        if supervisor is not None:
            supervisor.abort()

    async def close(self, *, timeout: float) -> None:
        """Refuses new requests, ends those that wait for a node, gives the others at most `timeout` seconds to end,
        fails the rest, and closes the placer."""
        self._draining = True
        for supervisor in self._running.values():
            supervisor.wait_no_more()
        if not await self._idle_within(timeout):
            _logger.warning("%d requests are ended because the router stops", len(self._running))
            for supervisor in self._running.values():
                supervisor.abort(UnavailableError("the router is stopping"))
            await self._idle_within(_ABORT_SECONDS)
        await self._placer.close()

    async def _idle_within(self, timeout: float) -> bool:
        """Waits for at most `timeout` seconds. Returns whether no request runs any more."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    def _supervisor(self, request: RoutedRequest) -> RequestSupervisor:
        return RequestSupervisor(
            request,
            f"{request.request_id}.{self._tag}.{next(self._wire_numbers)}",
            self._registry,
            self._placer,
            Tally(request, self._clock, self._metrics),
            self._inboxes,
            self._replays,
            limits=self._limits,
            clock=self._clock,
            random=self._random,
        )

    def _decode_node_came(self) -> None:
        for supervisor in self._running.values():
            supervisor.on_decode_node_live()
