"""What HTTP and gRPC share: requests are admitted, and the relay's tokens become the client's text. Both are counted.

Invariant: every choice ends with exactly one chunk that has a finish reason, and the relay's generator is closed
however this one ends. The relay is told of every choice that a stop string ends.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager

import grpc

from kvrelay.core.clock import Clock
from kvrelay.core.errors import DeadlineError, InvalidRequestError, status_of
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.generation.sampling_params import MAX_TOKEN_ENTRIES, SamplingParams
from kvrelay.core.generation.token_ids import check_token_ids
from kvrelay.text.choice import Choice, TextChunk
from kvrelay.text.tokenizer import Tokenizer
from router.edge.admission import Admission, Admissions
from router.edge.metrics import RouterMetrics
from router.edge.validation import ClientRequest, Prompt, RequestValidator
from router.request import Relay, RequestTrace, RoutedRequest, ServedModel

_logger = logging.getLogger(__name__)

GenerationEvent = TextChunk | PromptLogprobs | RequestTrace


class Edge:
    """The admission of clients' requests, the generation of their text, and the counts of both; and tokens of texts,
    and texts of tokens. `default_timeout`: most seconds that a request may take."""

    def __init__(
        self,
        relay: Relay,
        tokenizer: Tokenizer,
        model_name: str,
        metrics: RouterMetrics,
        clock: Clock,
        *,
        default_timeout: float,
    ) -> None:
        self.relay = relay
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.metrics = metrics
        self.validator = RequestValidator(tokenizer, model_name, default_timeout=default_timeout)
        self._clock = clock
        self._admissions = Admissions()

    def admission(self) -> Admission:
        """Returns what `admit` needs for the requests of a call: a context, in which those that are to run have to
        begin."""
        return self._admissions.begin()

    async def admit(self, clients: Mapping[str, ClientRequest], admission: Admission) -> list[RoutedRequest]:
        """Validates all requests of a call, given by their ids, which share one `sampling`. Raises what
        `RequestValidator.routed` raises, UnavailableError while no decode node is live, and OverloadedError before any
        work is done for them. From then on, until they begin or `admission` is closed, they count as running: another
        one of the same id is refused, and `abort` ends them."""
        with self.counting_errors():
            self.relay.check_capacity(len(self._admissions), len(clients))
            for request_id in filter(self._admissions.has, clients):
                raise InvalidRequestError(f"a request {request_id!r} is running already", field="request_id")
            admission.reserve(clients)
            first, *others = clients.values()
            assert all(client.sampling is first.sampling for client in others), "they differ only in their prompts"
            self.validator.check_model(first.model)
            _check_token_entries(first.sampling, len(clients))
            checked_for: ServedModel | None = None
            routed: list[RoutedRequest] = []
            for request_id, client in clients.items():
                if routed:
                    await asyncio.sleep(0)  # a hundred of them would keep the event loop waiting for too long
                model = self.relay.served_model()
                if model != checked_for:
                    sampling, checked_for = self.validator.sampling(first, model), model
                routed.append(await self.validator.routed(client, request_id, sampling, model))
            for request_id in clients:
                admission.check_aborted(request_id)
            return routed

    async def tokenize(self, prompt: Prompt, model_name: str | None) -> tuple[Sequence[int], int]:
        """Returns a prompt's tokens, and the model's length. Raises what `RequestValidator.token_ids` raises."""
        with self.counting_errors():
            self.validator.check_model(model_name)
            model = self.relay.served_model()
            return await self.validator.token_ids(prompt, model), model.max_model_len

    async def detokenize(
        self, token_ids: Sequence[int], model_name: str | None, *, skip_special_tokens: bool, field: str
    ) -> str:
        """Returns the text of tokens, of which there may be none. Raises InvalidRequestError that names `field`."""
        with self.counting_errors():
            self.validator.check_model(model_name)
            model = self.relay.served_model()
            if len(token_ids) > model.max_model_len:  # no text of the model is longer
                raise InvalidRequestError(
                    f"{field} has {len(token_ids)} entries, but the model's maximum is {model.max_model_len} tokens",
                    field=field,
                )
            check_token_ids(token_ids, model.vocab_size, field=field)
            return await self.tokenizer.decode_long(token_ids, skip_special_tokens=skip_special_tokens)

    def abort(self, request_id: str) -> None:
        """Ends a request with CancelledByPeerError, even before it begins; unknown ids are ignored."""
        self._admissions.abort(request_id)
        self.relay.abort(request_id)

    @contextmanager
    def counting_errors(self) -> Iterator[None]:
        """Counts the errors of code that may refuse a request before it is admitted, or fail."""
        try:
            yield
        except Exception as error:  # one that is not ours is counted as internal, as it is answered
            self.metrics.count_error(error)
            raise

    async def generate(self, request: RoutedRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yields PromptLogprobs (if requested), then chunks of every choice until each has a finish reason, then the
        trace. Raises KVRelayError. Closing it early aborts the request on every node."""
        sampling = request.sampling
        choices = [Choice(self.tokenizer, sampling, request.prompt_token_ids) for _ in range(sampling.n)]
        measurement = _Measurement(self.metrics, self._clock, request)
        try:
            self._admissions.end(request.request_id)  # it gets its place in the relay in this turn of the event loop
            async with aclosing(self.relay.run(request)) as events:
                async for event in events:
                    if not isinstance(event, TokenOutput):
                        if isinstance(event, RequestTrace):
                            measurement.traced(event)
                        yield event
                        continue
                    choice = choices[event.index]
                    if choice.finished:
                        continue  # a stop string has ended it; these tokens were under way
                    chunk = choice.consume(event)
                    measurement.produced(chunk)
                    yield chunk
                    if choice.ended_early:
                        self.relay.finish(request.request_id, event.index)  # otherwise its node would go on
            measurement.finished()
        except Exception as error:  # one that is not ours is counted as internal, as it is answered
            measurement.failed(error)
            raise
        finally:
            measurement.ended()


def _check_token_entries(sampling: SamplingParams, num_prompts: int) -> None:
    """Raises InvalidRequestError if a call of so many prompts has more token entries in all than one prompt may have.
    Each prompt takes them to a node by itself, so that a small body would become gigabytes there."""
    for field, entries in (("logit_bias", sampling.biases), ("stop_token_ids", sampling.stop_token_ids)):
        if len(entries) * num_prompts > MAX_TOKEN_ENTRIES:
            raise InvalidRequestError(
                f"{field} has {len(entries)} entries for each of {num_prompts} prompts, together more than the "
                f"{MAX_TOKEN_ENTRIES} of a call: give it fewer prompts",
                field=field,
            )


class _Measurement:
    """The measurement of one request. One that ends without having finished or failed was aborted by the client, unless
    its time was over: at the deadline of its call, too, gRPC only closes it."""

    __slots__ = ("_clock", "_finish_reason", "_has_outcome", "_last_times", "_metrics", "_request", "_start")

    def __init__(self, metrics: RouterMetrics, clock: Clock, request: RoutedRequest) -> None:
        self._metrics = metrics
        self._clock = clock
        self._request = request
        self._start = clock.now()
        self._last_times: dict[int, float] = {}  # of each choice, when its latest tokens came
        self._has_outcome = False
        self._finish_reason: FinishReason | None = None  # of the choice that finished first
        metrics.num_requests_running.inc()
        metrics.prompt_tokens.inc(len(request.prompt_token_ids))

    def produced(self, chunk: TextChunk) -> None:
        now = self._clock.now()
        if not self._last_times:
            self._metrics.time_to_first_token.observe(now - self._start)
        if chunk.index in self._last_times:
            self._metrics.inter_token_latency.observe(now - self._last_times[chunk.index])
        self._last_times[chunk.index] = now
        self._metrics.generation_tokens.inc(len(chunk.token_ids))
        self._finish_reason = self._finish_reason or chunk.finish_reason

    def traced(self, trace: RequestTrace) -> None:
        self._metrics.prompt_tokens_cached.inc(trace.num_cached_tokens)

    def finished(self) -> None:
        self._has_outcome = True
        self._metrics.e2e_latency.observe(self._clock.now() - self._start)
        self._metrics.count_success(self._finish_reason or FinishReason.ABORT)

    def failed(self, error: Exception) -> None:
        self._has_outcome = True
        self._metrics.count_error(error)
        if status_of(error).grpc_code is grpc.StatusCode.INTERNAL:  # all that the client is told of it is to look here
            _logger.error("request %s failed: %s", self._request.request_id, error)

    def ended(self) -> None:
        self._metrics.num_requests_running.dec()
        if self._has_outcome:
            return
        if self._request.is_over_after(self._clock.now() - self._start):
            self._metrics.count_error(DeadlineError("the request's time was over"))
        else:
            self._metrics.count_success(FinishReason.ABORT)
