"""The engine: schedule, launch, collect, update. One thread owns it; other threads reach it through `EngineThread`.

With `run_ahead`, a step is planned and launched while the step before it runs, on the assumption that every output
continues by one token. The runner fills in that token. If an output ends with it (an end token, an abort), the output's
extra token is discarded. Where the plan depends on the token itself, the engine waits for it: see
`Scheduler.can_run_ahead` and `Sequence.waits_for_result`. The tokens are the same with and without `run_ahead`.

Invariant between steps: every block is free, cached, referenced by a sequence, or pinned by a lease, by a step in
flight, or by a transfer that the node was told about. `check_idle` checks this when there are no requests.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import InvalidRequestError, KVRelayError, NotFiniteError
from kvrelay.core.generation.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.core.kv.block_hash import BlockHash, KVNamespace
from kvrelay.engine.block_names import BlockNames
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.cpu.step_threads import StepThreads
from kvrelay.engine.in_flight import StepInFlight, StepsInFlight
from kvrelay.engine.leases import Leases
from kvrelay.engine.plan import ModelRunnerOutput, SequenceResult
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.runner import Runner
from kvrelay.engine.sampling.sampler import SampledToken
from kvrelay.engine.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.sequence import Sequence, SequenceState
from kvrelay.engine.step_costs import StepCosts
from kvrelay.engine.step_result import (
    Changes,
    EngineLoad,
    PromptOutput,
    RequestFailure,
    Reservation,
    SequenceOutput,
    StepResult,
)

# Other nodes leave their cores to the prompts that wait here only if those take longer than this to compute.
_SHORT_QUEUE_SECONDS = 1.0


class Engine:
    """What turns requests into `StepResult`s, step by step. With `publish`, newly named blocks are pinned and reported
    so that the node can publish them. With `publish_hits`, so are blocks that a PRODUCE request has found by name,
    because what was published before may be gone. `run_ahead` is of use only with a runner whose steps run concurrently
    with the caller, on a GPU. `threads` are those of a runner that computes on the CPU. They rest when a step finds
    nothing to do; a caller that stops stepping before that calls `threads.rest`. `costs` are those of all steps."""

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        pool: BlockPool,
        namespace: KVNamespace,
        *,
        eos_token_ids: SequenceOf[int],
        publish: bool,
        publish_hits: bool = False,
        run_ahead: bool = False,
        threads: StepThreads | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self._runner = runner
        self._namespace = namespace
        self._eos_token_ids = frozenset(eos_token_ids)
        self._run_ahead = run_ahead
        self.threads = threads or StepThreads()
        self._clock: Clock = clock or MonotonicClock()
        changes = self._changes = Changes()
        self._in_flight = StepsInFlight(pool)
        self._names = BlockNames(
            pool, self._in_flight, changes, block_size=config.block_size, publish=publish, publish_hits=publish_hits
        )
        self._leases = Leases(pool, self._names, self._changes)
        self.costs = StepCosts()
        self._scheduler = Scheduler(config, pool, self._in_flight, self.costs, on_preempt=self._leases.restart)
        self._sequences: dict[str, list[Sequence]] = {}  # of each request, until all of them have ended
        self._num_arrived = 0
        self._num_steps = 0
        self._collected_at = 0.0

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Adds a request. A PRODUCE request also opens a lease of the same id. Raises InvalidRequestError if the
        request can never run."""
        self._check_fits(request)
        self._num_arrived += 1
        sequence = Sequence(
            request,
            index=request.first_choice_index,
            root=self._namespace.root(cache_salt=request.cache_salt),
            block_size=self.config.block_size,
            max_model_len=self.config.max_model_len,
            arrival=self._num_arrived,
            priority=request.priority if self.config.policy == "priority" else 0,
        )
        self._sequences[request.request_id] = [sequence]
        self._changes.load_changed = True
        if request.role is KVRole.PRODUCE:
            self._leases.open(request.request_id)
        self._scheduler.add(sequence)

    def deliver(self, request_id: str, num_blocks: int) -> None:
        """Notes that the first `num_blocks` missing blocks of a receiving request have their KV. Ignores unknown ids,
        since a request may have been aborted."""
        sequence = self._receiving(request_id)
        if sequence is not None:
            start = sequence.num_computed_tokens // self.config.block_size
            tokens = (start + num_blocks) * self.config.block_size
            sequence.num_computed_tokens = min(tokens, sequence.num_given_tokens)
            self._names.name_full_blocks(sequence)
            self._leases.extend(sequence, sequence.num_named_blocks)

    def start(self, request_id: str, first_tokens: SequenceOf[TokenOutput] = ()) -> None:
        """Starts a receiving request, for which no more KV will arrive. The engine computes what is missing, once for
        all outputs, and, for CONSUME, continues from `first_tokens`."""
        sequence = self._receiving(request_id)
        if sequence is None:
            return
        unfinished = [(output.index, output.token_ids[-1]) for output in first_tokens if output.finish_reason is None]
        sequence.prompt_reported = bool(first_tokens)
        self._scheduler.received(sequence)
        if len(unfinished) > 1 and sequence.num_computed_tokens < sequence.num_given_tokens:
            sequence.first_tokens = unfinished
        elif unfinished:
            self._branch(sequence, unfinished)

    def abort(self, request_id: str, *, distrust: bool = False) -> None:
        """Ends a request without further output, releases its blocks and ends its lease, if it has one. Idempotent.
        With `distrust`, nobody finds these blocks any more, whose KV may be wrong, nor those of its outputs that have
        ended, nor what is computed behind them."""
        sequences = self._sequences.pop(request_id, [])
        if distrust:
            self.pool.distrust(name for sequence in sequences for name in sequence.names())
        for sequence in sequences:
            self._scheduler.remove(sequence)
            self._changes.load_changed = True
        self.release_lease(request_id)

    def distrust(self, name: BlockHash) -> None:
        """Has nobody find a block any more, nor what was or will be computed behind it."""
        self.pool.distrust([name])

    def finish(self, request_id: str, index: int) -> None:
        """Ends one output, of which a token was sampled here, with the reason ABORT. The request's other outputs go on.
        Ignored if it has ended."""
        for sequence in self._sequences.get(request_id, ()):
            if sequence.index == index and sequence.has_new_tokens and sequence.state is not SequenceState.FINISHED:
                output = TokenOutput(index, (), finish_reason=FinishReason.ABORT)
                self._changes.outputs.append(SequenceOutput(request_id, output))
                self._finish(sequence)
                return

    def release_lease(self, request_id: str) -> None:
        """Ends the lease on a request's published blocks, which stay cached. Idempotent, and allowed in every state."""
        self._leases.release(request_id)

    def unpin(self, block_ids: SequenceOf[int]) -> None:
        """Unpins blocks reported in `Reservation.missing` or `StepResult.named` when their transfer has ended."""
        self.pool.unpin(block_ids)
        self._changes.load_changed = True  # the last report of an idle node must count them as free

    def check_idle(self) -> None:
        """Raises AssertionError if anything is left of any request. Steps in flight are collected first."""
        self.settle()
        assert not self._sequences, f"requests left: {sorted(self._sequences)}"
        self._leases.check_idle()
        self.pool.check_idle()

    @property
    def has_steps_in_flight(self) -> bool:
        """Tells whether a step was launched and not collected yet."""
        return bool(self._in_flight)

    def serves_only(self, request_id: str) -> bool:
        """Tells whether this request is here and no other one is."""
        return list(self._sequences) == [request_id]

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self, on_layers_begin: Callable[[], None] | None = None) -> tuple[StepResult | None, bool]:
        """Launches a step and collects it, or with `run_ahead` collects the step before it. If the launched step has
        written KV that other nodes wait for and still has to sample, it is left for the next call to collect, so that
        they can fetch meanwhile. Returns what has changed, None if nothing has, and whether another step could make
        progress without new requests. `on_layers_begin` is called once, when the model's layers begin, by runners on a
        CPU."""
        if self._in_flight and not self._run_ahead:
            self.settle()
            return self._take_result(), True
        was_in_flight = bool(self._in_flight)
        for sequence in self._scheduler.reserve():
            self._changes.reservations.append(self._reservation(sequence))
        if was_in_flight and not self._scheduler.can_run_ahead():
            self.settle()
        num_preemptions = self._scheduler.num_preemptions
        launched = self._launch(on_layers_begin)
        if launched and not self._run_ahead and self._name_written():
            return self._take_result(), True
        while len(self._in_flight) > int(self._run_ahead and launched):
            self._collect()
        has_preempted = self._scheduler.num_preemptions > num_preemptions  # whose blocks another may now reserve
        self._changes.load_changed |= has_preempted  # with no step and nothing else to report, nobody else would tell
        if not (launched or was_in_flight):
            self.threads.rest()
        return self._take_result(), launched or was_in_flight or has_preempted

    def settle(self) -> None:
        """Collects the steps in flight. The result of the next `step` includes theirs."""
        while self._in_flight:
            self._collect()

    def _launch(self, on_layers_begin: Callable[[], None] | None) -> bool:
        """Plans and launches a step. Returns False if there is nothing to compute."""
        plan, sequences = self._scheduler.schedule(on_borrowed_cores=self.threads.has_borrowed_cores())
        if not plan.scheduled:
            return False
        self._num_steps += 1
        started = self._clock.now()
        short_queue = self.costs.prompt_tokens_within(_SHORT_QUEUE_SECONDS)
        prompts_wait = self.threads.shares_cores and self._scheduler.prompts_wait(short_queue)
        self.threads.begin_step(on_layers_begin, prompts_wait=prompts_wait)
        try:
            self._in_flight.launch(self._runner, plan, sequences, started)
        except KVRelayError as error:
            self.settle()  # it may end some of these sequences, and no later plan may refer to a step that never ran
            self._fail(sequences, error)
        return True

    def _name_written(self) -> bool:
        """Names the blocks that the step just launched has written for PRODUCE requests, if only its sampling is left.
        Returns whether there is progress to report."""
        step = self._in_flight.newest
        if step is None or not step.launched.only_samples or not any(entry.rows for entry in step.plan.scheduled):
            return False
        num_before = len(self._changes.progress)
        for entry, sequence in zip(step.plan.scheduled, step.sequences, strict=True):
            if sequence.request.role is KVRole.PRODUCE:
                self._names.name_full_blocks(sequence, num_written_tokens=entry.num_scheduled_tokens)
                if entry.rows:
                    self._name_given(sequence)
                else:
                    self._leases.extend(sequence, sequence.num_named_blocks)
        return len(self._changes.progress) > num_before

    def _name_given(self, sequence: Sequence) -> None:
        """Names and leases all blocks of a PRODUCE request whose given tokens all have their KV."""
        if sequence.num_reported_blocks < len(sequence.block_table):
            self._names.name_tail(sequence)
            self._leases.extend(sequence, len(sequence.block_table))

    def _collect(self) -> None:
        step = self._in_flight.pop()
        try:
            output = step.launched.collect()
        except KVRelayError as error:
            self._fail(step.sequences, error)
            return
        finally:
            # The last report of an idle node must count its blocks as free.
            self._changes.load_changed |= self._in_flight.end(step)
        now = self._clock.now()
        self.costs.count(step.plan, now - max(step.launched_at, self._collected_at))
        self._collected_at = now
        self._update(step, output)

    def _update(self, step: StepInFlight, output: ModelRunnerOutput) -> None:
        for entry, sequence, result in zip(step.plan.scheduled, step.sequences, output.results, strict=True):
            if sequence.state is SequenceState.FINISHED:
                continue  # it ended while the step was in flight, which computed its extra token
            if not result.is_finite:
                # Perhaps because of a fault in an earlier step, which all who find its blocks would repeat.
                self._fail([sequence], NotFiniteError("the model returned logits that are not finite"))
                continue
            sequence.num_computed_tokens += entry.num_scheduled_tokens
            if result.prompt_logprobs is not None:
                sequence.prompt_logprobs.extend(result.prompt_logprobs)
            self._names.name_full_blocks(sequence)
            if entry.rows and sequence.first_tokens:
                self._branch(sequence, sequence.first_tokens)
            elif entry.rows and not sequence.has_new_tokens:
                self._finish_given(sequence, result)
            elif entry.rows:
                self._append(sequence, result.sampled[0])
            else:
                self._leases.extend(sequence, sequence.num_named_blocks)

    def _finish_given(self, sequence: Sequence, result: SequenceResult) -> None:
        """Reports the prompt and the first new token of every output, sampled from the last given token's logits."""
        request = sequence.request
        sequence.prompt_reported = True
        prompt = PromptOutput(request.request_id, sequence.num_cached_tokens, sequence.prompt_logprobs)
        self._changes.prompts.append(prompt)
        if request.role is KVRole.PRODUCE:
            self._name_given(sequence)
        unfinished = []
        num_output_tokens = sequence.num_output_tokens + 1
        for index, sampled in zip(request.choices, result.sampled, strict=True):
            if self._report(sequence, index, sampled, num_output_tokens=num_output_tokens) is None:
                unfinished.append((index, sampled.token_id))
        if request.role is KVRole.PRODUCE or not unfinished:
            self._finish(sequence)
        else:
            self._branch(sequence, unfinished)

    def _append(self, sequence: Sequence, sampled: SampledToken) -> None:
        sequence.token_ids.append(sampled.token_id)
        if self._report(sequence, sequence.index, sampled, num_output_tokens=sequence.num_output_tokens) is not None:
            self._finish(sequence)

    def _report(
        self, sequence: Sequence, index: int, sampled: SampledToken, *, num_output_tokens: int
    ) -> FinishReason | None:
        reason, stop_token_id = sequence.finish_reason(sampled.token_id, num_output_tokens, self._eos_token_ids)
        logprobs: tuple[TokenLogprobs, ...] = () if sampled.logprobs is None else (sampled.logprobs,)
        output = TokenOutput(index, (sampled.token_id,), logprobs, reason, stop_token_id)
        self._changes.outputs.append(SequenceOutput(sequence.request.request_id, output))
        return reason

    def _branch(self, sequence: Sequence, tokens: list[tuple[int, int]]) -> None:
        """Continues each output (index, first new token) as a sequence of its own. They share the given tokens'
        blocks."""
        siblings = [sequence.fork(index, token_id) for index, token_id in tokens[1:]]
        if siblings:
            self.pool.acquire(sequence.block_table, times=len(siblings))
        for sibling in siblings:
            self._scheduler.run(sibling)
        sequence.index, token_id = tokens[0]  # below its siblings', so that its place among the running ones stays
        sequence.token_ids.append(token_id)
        sequence.first_tokens = []
        self._sequences[sequence.request.request_id] = [sequence, *siblings]

    def _finish(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        request_id = sequence.request.request_id
        if all(sibling.state is SequenceState.FINISHED for sibling in self._sequences[request_id]):
            del self._sequences[request_id]

    def _fail(self, sequences: SequenceOf[Sequence], error: KVRelayError) -> None:
        is_not_finite = isinstance(error, NotFiniteError)
        left = [sequence for sequence in sequences if sequence.state is not SequenceState.FINISHED]
        for request_id in dict.fromkeys(sequence.request.request_id for sequence in left):
            self.abort(request_id, distrust=is_not_finite)
            self._changes.failures.append(RequestFailure(request_id, str(error), is_not_finite))

    # -- results -----------------------------------------------------------------------------------------------------

    def _reservation(self, sequence: Sequence) -> Reservation:
        """Returns the report of an admitted sequence, and pins the blocks that wait for KV."""
        missing = sequence.missing_blocks()
        self.pool.pin([block.block_id for block in missing])
        return Reservation(sequence.request.request_id, sequence.num_computed_tokens, tuple(missing))

    def _take_result(self) -> StepResult | None:
        stored, removed = self.pool.drain_changes()
        self._changes.distrusted += self.pool.drain_distrusted()
        if not (self._changes.any() or stored or removed):
            return None
        return self._changes.take(stored, removed, self.load())

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        computing = [sequence for sequence in scheduler.running if sequence.num_missing_tokens > 1]
        return EngineLoad(
            num_requests_running=len(scheduler.running) + len(scheduler.receiving),
            num_requests_decoding=len(scheduler.running) - len(computing),
            num_requests_waiting=len(scheduler.waiting) + len(scheduler.reserving),
            # Sequences that wait have nothing computed, and nothing is sampled for them. Which of their tokens are
            # cached is looked up when they begin. The KV of those that reserve blocks comes from outside.
            num_queued_tokens=sum(sequence.num_missing_tokens for sequence in computing) + scheduler.waiting.num_tokens,
            num_free_blocks=self.pool.num_free,
            num_blocks=self.pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_leases=len(self._leases),
            num_steps=self._num_steps,
            num_borrowing_steps=self.threads.num_borrowing_steps,
            num_prefilled_tokens=self.costs.num_prompt_tokens,
            prefill_seconds=self.costs.prompt_seconds,
            first_lacking=scheduler.first_lacking(),
        )

    def _receiving(self, request_id: str) -> Sequence | None:
        sequences = self._sequences.get(request_id)
        if sequences and sequences[0].state is SequenceState.RECEIVING:
            return sequences[0]
        return None

    def _check_fits(self, request: EngineRequest) -> None:
        """Raises InvalidRequestError for a request that could not run to its end even if it were alone."""
        if request.request_id in self._sequences or request.request_id in self._leases:
            raise InvalidRequestError(f"request {request.request_id} is running already", field="request_id")
        request.check_fits(max_model_len=self.config.max_model_len, max_num_seqs=self.config.max_num_seqs)
