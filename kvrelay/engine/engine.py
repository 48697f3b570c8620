"""The engine: schedule, run, update. One thread owns it; `EngineThread` is how the others reach it.

Invariant between steps: every block is free, cached, referenced by a sequence, or pinned by a lease or by a transfer
the node was told about; `check_idle` says so when there are no requests.
"""

from collections.abc import Sequence as SequenceOf

from kvrelay.core.block_hash import BlockHash, KVNamespace
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.errors import InvalidRequestError, KVRelayError
from kvrelay.core.outputs import FinishReason, TokenLogprobs, TokenOutput
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.changes import Changes
from kvrelay.engine.plan import ModelRunnerOutput, SchedulerOutput, SequenceResult
from kvrelay.engine.prefill_meter import PrefillMeter
from kvrelay.engine.request import (
    Admission,
    EngineLoad,
    EngineRequest,
    KVRole,
    PinnedBlock,
    PromptOutput,
    RequestFailure,
    RequestOutput,
    StepResult,
)
from kvrelay.engine.runner import Runner
from kvrelay.engine.sampler import SampledToken
from kvrelay.engine.scheduler import Scheduler, SchedulerConfig
from kvrelay.engine.sequence import Sequence, SequenceState


class Engine:
    """Requests in, `StepResult`s out. `publish`: newly named blocks are pinned and reported so that the node can
    publish them. `publish_hits`: so are blocks that a PRODUCE request has found by name, since what was published once
    may be gone.
    """

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
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self._runner = runner
        self._namespace = namespace
        self._eos_token_ids = frozenset(eos_token_ids)
        self._publish = publish
        self._publish_hits = publish and publish_hits
        self._clock: Clock = clock or MonotonicClock()
        self._scheduler = Scheduler(config, pool, on_preempt=self._restart_lease)
        self._sequences: dict[str, list[Sequence]] = {}
        self._leases: dict[str, list[int]] = {}
        self._changes = Changes()
        self._num_arrived = 0
        self._num_steps = 0
        self._prefill = PrefillMeter()

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Takes a request. A PRODUCE request opens the lease of the same id. Raises InvalidRequestError when it can
        never run.
        """
        self._check_fits(request)
        self._num_arrived += 1
        sequence = Sequence(
            request,
            index=request.first_choice_index,
            root=self._namespace.root(cache_salt=request.cache_salt),
            block_size=self.config.block_size,
            arrival=self._num_arrived,
            priority=request.priority if self.config.policy == "priority" else 0,
        )
        self._sequences[request.request_id] = [sequence]
        self._changes.load = True
        if request.role is KVRole.PRODUCE:
            self._leases[request.request_id] = []
        self._scheduler.add(sequence)

    def deliver(self, request_id: str, num_blocks: int) -> None:
        """The first `num_blocks` missing blocks of a receiving request hold their KV now. Unknown ids are ignored: it
        was aborted.
        """
        sequence = self._receiving(request_id)
        if sequence is not None:
            start = sequence.num_computed_tokens // self.config.block_size
            tokens = (start + num_blocks) * self.config.block_size
            sequence.num_computed_tokens = min(tokens, sequence.num_given_tokens)
            self._name_full_blocks(sequence)
            self._extend_lease(sequence, sequence.num_named_blocks)

    def start(self, request_id: str, first_tokens: SequenceOf[TokenOutput] = ()) -> None:
        """No more KV will arrive for a receiving request: compute what is missing and go on from `first_tokens`
        (CONSUME only).
        """
        sequence = self._receiving(request_id)
        if sequence is None:
            return
        unfinished = [(output.index, output.token_ids[-1]) for output in first_tokens if output.finish_reason is None]
        sequence.prompt_reported = bool(first_tokens)
        self._scheduler.received(sequence)
        if unfinished:
            self._branch(sequence, unfinished)

    def abort(self, request_id: str) -> None:
        """Ends a request without output and gives its blocks back; its lease, if any, ends too. Idempotent."""
        for sequence in self._sequences.pop(request_id, []):
            self._scheduler.remove(sequence)
            self._changes.load = True
        self.release_lease(request_id)

    def release_lease(self, request_id: str) -> None:
        """Ends the lease on a request's published blocks; they stay cached. Idempotent and valid in every state."""
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self.pool.unpin(lease)
            self._changes.load = True

    def unpin(self, block_ids: SequenceOf[int]) -> None:
        """A transfer of these blocks, reported as `Admission.missing` or `StepResult.named`, has ended."""
        self.pool.unpin(block_ids)
        self._changes.load = True  # an idle node's last report must say that they are free

    def check_idle(self) -> None:
        """Raises when anything is left of any request."""
        assert not self._sequences, f"requests left: {sorted(self._sequences)}"
        assert not self._leases, f"leases left: {sorted(self._leases)}"
        self.pool.check_idle()

    # -- the step ----------------------------------------------------------------------------------------------------

    def step(self) -> tuple[StepResult | None, bool]:
        """One step. The result is None when nothing changed; the flag says whether another step could do anything by
        itself.
        """
        for sequence in self._scheduler.reserve():
            self._changes.admissions.append(self._admission(sequence))
        plan, sequences = self._scheduler.schedule()
        if plan.scheduled:
            self._num_steps += 1
            started = self._clock.now()
            try:
                output = self._runner.launch(plan).collect()
            except KVRelayError as error:
                self._fail(sequences, str(error))
            else:
                self._prefill.count(plan, self._clock.now() - started)
                self._update(plan, sequences, output)
        return self._take_result(), bool(plan.scheduled)

    def _update(self, plan: SchedulerOutput, sequences: list[Sequence], output: ModelRunnerOutput) -> None:
        for entry, sequence, result in zip(plan.scheduled, sequences, output.results, strict=True):
            sequence.num_computed_tokens += entry.num_scheduled_tokens
            sequence.prompt_logprobs.extend(result.prompt_logprobs)
            self._name_full_blocks(sequence)
            if entry.rows and not sequence.has_new_tokens:
                self._finish_given(sequence, result)
            elif entry.rows:
                self._append(sequence, result.sampled[0])
            else:
                self._extend_lease(sequence, sequence.num_named_blocks)

    def _finish_given(self, sequence: Sequence, result: SequenceResult) -> None:
        """The last given token's logits are here: every output of the request gets its first new token."""
        request = sequence.request
        if not sequence.prompt_reported:
            sequence.prompt_reported = True
            logprobs = tuple(sequence.prompt_logprobs)
            self._changes.prompts.append(PromptOutput(request.request_id, sequence.num_cached_tokens, logprobs))
        if request.role is KVRole.PRODUCE:
            self._name_tail(sequence)
            self._extend_lease(sequence, len(sequence.block_table))
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
        reason, stop_token_id = self._finish_reason(sequence, sampled.token_id, num_output_tokens)
        logprobs: tuple[TokenLogprobs, ...] = () if sampled.logprobs is None else (sampled.logprobs,)
        output = TokenOutput(index, (sampled.token_id,), logprobs, reason, stop_token_id)
        self._changes.outputs.append(RequestOutput(sequence.request.request_id, output))
        return reason

    def _finish_reason(
        self, sequence: Sequence, token_id: int, num_output_tokens: int
    ) -> tuple[FinishReason | None, int | None]:
        sampling = sequence.request.sampling
        ended = token_id in self._eos_token_ids and not sampling.ignore_eos
        if ended or token_id in sampling.stop_token_ids:
            return FinishReason.STOP, token_id
        num_tokens = sequence.num_prompt_tokens + num_output_tokens
        if num_output_tokens >= sampling.max_tokens or num_tokens >= self.config.max_model_len:
            return FinishReason.LENGTH, None
        return None, None

    def _branch(self, sequence: Sequence, tokens: list[tuple[int, int]]) -> None:
        """The outputs (index, first new token) go on as one sequence each, sharing the given tokens' blocks."""
        siblings = [sequence.fork(index) for index, _ in tokens[1:]]
        for sibling in siblings:
            self.pool.acquire(sibling.block_table)
            self._scheduler.run(sibling)
        sequence.index = tokens[0][0]
        branches = [sequence, *siblings]
        for branch, (_, token_id) in zip(branches, tokens, strict=True):
            branch.token_ids.append(token_id)
        self._sequences[sequence.request.request_id] = branches

    def _finish(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        request_id = sequence.request.request_id
        siblings = self._sequences[request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences[request_id]

    def _fail(self, sequences: list[Sequence], message: str) -> None:
        for request_id in dict.fromkeys(sequence.request.request_id for sequence in sequences):
            self.abort(request_id)
            self._changes.failures.append(RequestFailure(request_id, message))

    # -- names and leases --------------------------------------------------------------------------------------------

    def _name_full_blocks(self, sequence: Sequence) -> None:
        num_full = sequence.num_computed_tokens // self.config.block_size
        if num_full == sequence.num_named_blocks:
            return
        names = sequence.names(num_full)
        for index in range(sequence.num_named_blocks, num_full):
            self._name(sequence, index, names[index], self.config.block_size)
        sequence.num_named_blocks = num_full

    def _name_tail(self, sequence: Sequence) -> None:
        tail = sequence.given_tail()
        if tail is not None:
            self._name(sequence, len(sequence.block_table) - 1, *tail)

    def _name(self, sequence: Sequence, index: int, block_hash: BlockHash, num_tokens: int) -> None:
        """Names a computed block; when another block has the name already, the sequence takes that one and gives its
        own back.
        """
        block_id = sequence.block_table[index]
        holder = self.pool.find(block_hash)
        if holder is None:
            self.pool.register(block_id, block_hash)
            if self._publish:
                self._offer(PinnedBlock(block_id, block_hash, num_tokens))
            return
        if holder != block_id:
            self.pool.acquire([holder])
            self.pool.release([block_id])
            sequence.block_table[index] = holder
        if self._publish_hits and sequence.request.role is KVRole.PRODUCE:
            self._offer(PinnedBlock(holder, block_hash, num_tokens))

    def _offer(self, block: PinnedBlock) -> None:
        """Has the node publish a block; it unpins it."""
        self.pool.pin([block.block_id])
        self._changes.named.append(block)

    def _offer_hits(self, sequence: Sequence) -> None:
        """Before the first progress of a PRODUCE request: the blocks that were here already."""
        num_hits = sequence.num_cached_tokens // self.config.block_size
        for block_id, block_hash in zip(sequence.block_table, sequence.names(num_hits), strict=False):
            self._offer(PinnedBlock(block_id, block_hash, self.config.block_size))

    def _extend_lease(self, sequence: Sequence, num_blocks: int) -> None:
        """The first `num_blocks` blocks of a PRODUCE request stay until its lease ends. One that has ended already
        keeps nothing, but who waits for the blocks still hears of them.
        """
        request = sequence.request
        if request.role is not KVRole.PRODUCE:
            return
        lease = self._leases.get(request.request_id)
        if lease is not None and num_blocks > len(lease):
            blocks = sequence.block_table[len(lease) : num_blocks]
            self.pool.pin(blocks)
            lease.extend(blocks)
        if num_blocks > sequence.num_reported_blocks:
            if self._publish_hits and sequence.num_reported_blocks == 0:
                self._offer_hits(sequence)
            sequence.num_reported_blocks = num_blocks
            self._changes.progress.append((request.request_id, num_blocks))

    def _restart_lease(self, sequence: Sequence) -> None:
        """A preempted request keeps no blocks by its lease either: two such would wait for each other for ever."""
        lease = self._leases.get(sequence.request.request_id)
        if lease:
            self.pool.unpin(lease)
            lease.clear()

    # -- results -----------------------------------------------------------------------------------------------------

    def _admission(self, sequence: Sequence) -> Admission:
        """Pins the blocks that wait for KV: the last given token's own block is left out when it is computed here
        anyway.
        """
        num_cached = sequence.num_named_blocks
        wanted = sequence.names(sequence.num_cacheable_blocks)[num_cached:]
        missing = [
            PinnedBlock(sequence.block_table[num_cached + offset], name, self.config.block_size)
            for offset, name in enumerate(wanted)
        ]
        if sequence.request.role is KVRole.CONSUME and (tail := sequence.given_tail()) is not None:
            missing.append(PinnedBlock(sequence.block_table[-1], *tail))
        self.pool.pin([block.block_id for block in missing])
        return Admission(sequence.request.request_id, sequence.num_computed_tokens, tuple(missing))

    def _take_result(self) -> StepResult | None:
        stored, removed = self.pool.drain_changes()
        changes = self._changes
        if not (changes.any() or stored or removed):
            return None
        self._changes = Changes()
        return StepResult(
            admissions=tuple(changes.admissions),
            prompts=tuple(changes.prompts),
            outputs=tuple(changes.outputs),
            failures=tuple(changes.failures),
            named=tuple(changes.named),
            progress=tuple(changes.progress),
            stored=tuple(stored),
            removed=tuple(removed),
            load=self.load(),
        )

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        queued = (*scheduler.waiting, *scheduler.reserving)
        computing = sum(s.num_missing_tokens for s in scheduler.running if s.num_missing_tokens > 1)
        return EngineLoad(
            num_requests_running=len(scheduler.running) + len(scheduler.receiving),
            num_requests_decoding=sum(s.num_output_tokens > 0 for s in scheduler.running),
            num_requests_waiting=len(queued),
            num_queued_tokens=computing + sum(sequence.num_missing_tokens for sequence in queued),
            num_free_blocks=self.pool.num_free,
            num_blocks=self.pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_leases=len(self._leases),
            num_steps=self._num_steps,
            num_prefilled_tokens=self._prefill.num_tokens,
            prefill_seconds=self._prefill.seconds,
        )

    def _receiving(self, request_id: str) -> Sequence | None:
        sequences = self._sequences.get(request_id)
        if sequences and sequences[0].state is SequenceState.RECEIVING:
            return sequences[0]
        return None

    def _check_fits(self, request: EngineRequest) -> None:
        """A request that passes will run to its end even if it has to run alone."""
        num_given = len(request.given_token_ids)
        if request.request_id in self._sequences or request.request_id in self._leases:
            raise InvalidRequestError(f"request {request.request_id} is running already", field="request_id")
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", field="prompt")
        if num_given >= self.config.max_model_len:
            raise InvalidRequestError(
                f"the prompt has {num_given} tokens; with one output token that is more than max_model_len "
                f"({self.config.max_model_len})",
                field="prompt",
            )
        if request.sampling.n > self.config.max_num_seqs:
            raise InvalidRequestError(f"n is above max_num_seqs ({self.config.max_num_seqs})", field="n")
