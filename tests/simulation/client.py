"""Clients: what they request, how they behave, and which ends are allowed. The real edge admits their requests.

Invariant: the tokens a client was given are a beginning of the right ones, and it was told of at most one ending.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, cast

from kvrelay.core.errors import (
    CancelledByPeerError,
    DeadlineError,
    GivenUpError,
    InvalidRequestError,
    KVRelayError,
    OverloadedError,
    UnavailableError,
)
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.node_report import NodeDescription
from router.edge.validation import ClientRequest, RequestValidator, TokenPrompt
from router.nodes.node import NodeState
from router.relay.relay import ClusterRelay
from router.request import RequestTrace, RoutedRequest, ServedModel
from tests.simulation.engine import STEP_FAILED
from tests.simulation.node_config import BLOCK_SIZE
from tests.simulation.oracle import ExpectedOutput, expected_output

if TYPE_CHECKING:
    from kvrelay.text.tokenizer import Tokenizer

LONG_TIMEOUT = 100.0  # more than twice what the slowest request has taken
LONG_WAIT = 60.0  # longer than no node of a kind lives
REFUSALS = ("no decode node can serve now", "no decode node lives that has")  # of a request that has not begun


class Behaviour(Enum):
    PATIENT = "patient"  # reads to the end
    LEAVES = "leaves"  # closes its stream after some tokens
    DISAPPEARS = "disappears"  # is cancelled at some time
    ABORTS = "aborts"  # asks for an abort after some tokens
    SATISFIED = "satisfied"  # has enough of each output after some tokens (a stop string)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a client does. It asks the router of that index. After `enough` tokens it acts as its `behaviour` says.
    Times are in seconds."""

    request: RoutedRequest
    behaviour: Behaviour
    arrives_at: float
    router: int = 0
    enough: int = 0
    disappears_after: float = 0.0
    longest_pause: float = 0.0  # of a client that reads slowly


@dataclass(slots=True)
class Client:
    """One request. `excuses`: texts that an UnavailableError or a GivenUpError may have. `lateness`: seconds for which
    its router may be stopped. `report` is called with each violation."""

    plan: Plan
    excuses: tuple[str, ...]
    lateness: float
    report: Callable[[str], None]
    trace: Callable[[str], None]
    random: Random
    ending: str = ""
    num_migrations: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    _finished: dict[int, FinishReason] = field(default_factory=dict)
    _num_endings: int = 0
    _has_prompt_logprobs: bool = False
    _over_at: float = math.inf  # when the request has ended, at the latest
    _paused: float = 0.0  # seconds in which the client took nothing

    @property
    def name(self) -> str:
        return self.plan.request.request_id

    async def run(self, relay: ClusterRelay) -> None:
        """Sends the request, and returns when it has ended in any way."""
        loop = asyncio.get_running_loop()
        started = loop.time() + self.plan.arrives_at
        try:
            await asyncio.sleep(self.plan.arrives_at)
            started = loop.time()
            self._over_at = started + self.plan.request.timeout
            self.trace(f"client {self.name} asks ({self.plan.behaviour.value})")
            await self._read(relay)
        except asyncio.CancelledError:
            if not self.ending:
                self._ended("disappeared")
            raise
        except KVRelayError as error:
            self._on_error(error, loop.time() - started, relay)

    async def _admitted(self, relay: ClusterRelay) -> bool:
        """Asks the edge to admit the request. Returns False if it is refused, for a good reason."""
        request = self.plan.request
        try:
            relay.check_capacity()
            client, validator, model = _as_asked(request), _validator(request.timeout), relay.served_model()
            admitted = await validator.routed(client, self.name, validator.sampling(client, model), model)
        except OverloadedError as error:
            if len(relay._running) < relay._limits.max_concurrent_requests:
                self.report(f"{self.name}: refused with {error!r}")
            self._ended("overloaded")
            return False
        except InvalidRequestError as error:
            if _is_served(request, relay.served_model()):
                self.report(f"{self.name}: refused with {error!r}")
            self._ended("refused")
            return False
        if admitted != request:
            self.report(f"{self.name}: admitted as {admitted}")
        return True

    async def _read(self, relay: ClusterRelay) -> None:
        if not await self._admitted(relay):
            return
        async with aclosing(relay.run(self.plan.request)) as events:
            async for event in events:
                self._check_in_time(type(event).__name__)
                if len(relay._running) > relay._limits.max_concurrent_requests:
                    self.report(f"{self.name}: {len(relay._running)} requests run at its router")
                match event:
                    case RequestTrace():
                        self._on_trace(event)
                    case PromptLogprobs():
                        self._on_prompt_logprobs(event)
                    case output:
                        self._on_output(output)
                        if self._has_enough(output, relay):
                            self._ended("left")
                            return
                if self.plan.longest_pause:
                    pause = self.random.uniform(0.0, self.plan.longest_pause)
                    self._paused += pause
                    await asyncio.sleep(pause)
        if self._num_endings == 0:
            self.report(f"{self.name}: the events ended without a trace and without an error")

    def _has_enough(self, output: TokenOutput, relay: ClusterRelay) -> bool:
        """Acts as the behaviour says after enough tokens. Returns whether the client stops reading."""
        if len(self.tokens[output.index]) < self.plan.enough:
            return False
        match self.plan.behaviour:
            case Behaviour.LEAVES:
                return True
            case Behaviour.ABORTS:
                relay.abort(self.name)
                self._over_at = min(self._over_at, self._now)
            case Behaviour.SATISFIED:
                relay.finish(self.name, output.index)
                self._finished.setdefault(output.index, FinishReason.STOP)
                if len(self._finished) == self.plan.request.sampling.n:
                    self._over_at = min(self._over_at, self._now)
        return False

    # -- what comes ----------------------------------------------------------------------------------------------------

    def _on_output(self, output: TokenOutput) -> None:
        self._check_not_ended("a token")
        sampling = self.plan.request.sampling
        found = self.tokens.setdefault(output.index, [])
        if output.index in self._finished:
            if self.plan.behaviour is not Behaviour.SATISFIED:
                self.report(f"{self.name}: output {output.index} goes on after its end")
            return
        found.extend(output.token_ids)
        self.trace(f"client {self.name} has {len(found)} tokens of output {output.index}")
        if output.finish_reason is not None:
            self._finished[output.index] = output.finish_reason
        wants_logprobs = sampling.logprobs is not None
        if [entry.token_id for entry in output.logprobs] != (list(output.token_ids) if wants_logprobs else []):
            self.report(f"{self.name}: logprobs are not those of the tokens")
        if sampling.prompt_logprobs is not None and not self._has_prompt_logprobs:
            self.report(f"{self.name}: a token came before the prompt's logprobs")

    def _on_prompt_logprobs(self, event: PromptLogprobs) -> None:
        self._check_not_ended("prompt logprobs")
        targets = tuple(entry.token_id for entry in event)
        if self._has_prompt_logprobs:
            self.report(f"{self.name}: prompt logprobs came twice")
        if targets != self.plan.request.prompt_token_ids[1:]:
            self.report(f"{self.name}: prompt logprobs are not those of the prompt: {targets}")
        self._has_prompt_logprobs = True

    def _on_trace(self, trace: RequestTrace) -> None:
        self._ended("complete")
        self.num_migrations = trace.num_migrations
        num_prompt_tokens = len(self.plan.request.prompt_token_ids)
        if (
            trace.num_cached_tokens + trace.num_computed_tokens != num_prompt_tokens
            or min(trace.num_cached_tokens, trace.num_computed_tokens) < 0
            or trace.num_prompt_blocks != -(-num_prompt_tokens // BLOCK_SIZE)
            or not 0.0 <= trace.queue_seconds <= trace.ttft_seconds <= trace.e2e_seconds
        ):
            self.report(f"{self.name}: the trace does not add up: {trace}")

    def _on_error(self, error: KVRelayError, elapsed: float, relay: ClusterRelay) -> None:
        self._check_in_time(type(error).__name__)
        self._ended(type(error).__name__)
        self.trace(f"client {self.name}: {type(error).__name__}: {error}")
        match error:
            case CancelledByPeerError() if self.plan.behaviour is Behaviour.ABORTS:
                return
            case DeadlineError() if LONG_TIMEOUT > self.plan.request.timeout <= elapsed + 1e-6:
                return
            case KVRelayError() if str(error) == STEP_FAILED:
                return
            case UnavailableError() | GivenUpError() if any(excuse in str(error) for excuse in self.excuses):
                return
            case UnavailableError() if self._is_refusal(error) and not _has_decode_node(self.plan.request, relay):
                return
        self.report(f"{self.name}: ended after {elapsed:.3f} s with {error!r}")

    def _is_refusal(self, error: UnavailableError) -> bool:
        has_begun = self.tokens or self._has_prompt_logprobs
        return not has_begun and any(why in str(error) for why in REFUSALS)

    @property
    def _now(self) -> float:
        """Returns the time, without what the client has slept."""
        return asyncio.get_running_loop().time() - self._paused

    def _check_in_time(self, what: str) -> None:
        """Reports what comes after the request's time is over, it was aborted, or all its outputs were enough."""
        if self._now > self._over_at + self.lateness:
            self.report(f"{self.name}: {what} came {self._now - self._over_at:.3f} s after the request had to be over")

    def _ended(self, how: str) -> None:
        self._check_not_ended(how)
        self.ending = how
        self._num_endings += 1
        self.trace(f"client {self.name}: {how}")

    def _check_not_ended(self, what: str) -> None:
        if self._num_endings:
            self.report(f"{self.name}: {what} after it had ended ({self.ending})")

    # -- what should have come -----------------------------------------------------------------------------------------

    def check(self, *, calm: bool) -> None:
        """Reports what is wrong at the end of the run. `calm`: nothing went wrong, so there was a node for every
        request."""
        request = self.plan.request
        if not self.ending:
            self.report(f"{self.name}: has not ended")
        if calm and self.ending == UnavailableError.__name__:
            self.report(f"{self.name}: ended with {self.ending} though nothing went wrong")
        for index in range(request.sampling.n):
            expected = expected_output(request.prompt_token_ids, request.sampling, index)
            self._check_output(index, expected)

    def _check_output(self, index: int, expected: ExpectedOutput) -> None:
        found = tuple(self.tokens.get(index, ()))
        if found != expected.token_ids[: len(found)]:
            self.report(f"{self.name}: output {index} is {found}, not {expected.token_ids}")
        if self.plan.behaviour is Behaviour.SATISFIED:
            if self.ending == "complete" and len(found) < min(self.plan.enough, len(expected.token_ids)):
                self.report(f"{self.name}: output {index} has {len(found)} tokens")
        elif self.ending == "complete" and (found, self._finished.get(index)) != (
            expected.token_ids,
            expected.finish_reason,
        ):
            self.report(f"{self.name}: output {index} is {found} {self._finished.get(index)}, not {expected}")


def _validator(timeout: float) -> RequestValidator:
    no_text = cast("Tokenizer", None)  # prompts are tokens
    return RequestValidator(no_text, "simulated", default_timeout=timeout)


def _as_asked(request: RoutedRequest) -> ClientRequest:
    """Returns the request as a client writes it. The edge makes the same of it again."""
    return ClientRequest(
        TokenPrompt(request.prompt_token_ids),
        request.sampling,
        max_tokens=request.sampling.max_tokens,
        priority=request.priority,
        cache_salt=request.cache_salt.decode() or None,
    )


def _has_decode_node(request: RoutedRequest, relay: ClusterRelay) -> bool:
    """Tells whether the router knows a live decode node that can serve the request."""
    live = (node.description for node in relay._registry.decode if node.state is NodeState.LIVE)
    return any(description is not None and _is_served(request, description) for description in live)


def _is_served(request: RoutedRequest, by: ServedModel | NodeDescription) -> bool:
    """Tells whether every live node, or the one described, can serve the request."""
    num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
    return num_tokens <= by.max_model_len and request.sampling.n <= by.max_num_seqs
