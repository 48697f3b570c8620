"""Decides what the next step computes. There are no phases: the `num_computed_tokens` of a sequence catch up with its
tokens.

Tokens of earlier chunks, prefix hits, KV received from other nodes and the tokens of launched steps all count as
already computed. Invariant: every sequence is in exactly one of the queues, and owns one request reference for each
entry of its block table.

Computing chunks of prompts together with decodes follows Sarathi-Serve (Agrawal et al., 2024), section 4. Preemption by
recomputing follows PagedAttention (Kwon et al., 2023), section 4.5.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, islice

from kvrelay.core.config.option_types import SchedulingPolicy
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.layout import num_blocks_for
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.block_shortage import BlockShortage, find_shortage
from kvrelay.engine.claims import Claims, num_blocks_ahead
from kvrelay.engine.in_flight import StepsInFlight
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.plan_entry import plan_entry
from kvrelay.engine.sampling.penalties import reads_tokens
from kvrelay.engine.sequence import Sequence, SequenceState
from kvrelay.engine.sequence_queue import SequenceQueue
from kvrelay.engine.step_budget import StepBudget, without_share
from kvrelay.engine.step_costs import StepCosts


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a scheduler. `max_num_batched_tokens` is the most tokens of a step, and `max_num_seqs` the most
    sequences running at a time. `max_num_mixed_tokens` is the limit of a step that also decodes, decodes included
    (`StepBudget`). The policy `fcfs` ignores the priority of requests; with `priority` lower values go first, and among
    equals the one that came first."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    max_model_len: int
    policy: SchedulingPolicy = "fcfs"


class Scheduler:
    """The queues of sequences, and the plans of steps. The engine thread owns it.

    Only receiving and running sequences hold blocks. Blocks can therefore always be taken from a running sequence, or
    will be released by a receiving one. `on_preempt` is called with a sequence that has just lost its blocks, and must
    release whatever else keeps them. `costs` are of the steps that were planned here."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        in_flight: StepsInFlight,
        costs: StepCosts,
        *,
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        self.config = config
        self._in_flight = in_flight
        self._budget = StepBudget(config.max_num_batched_tokens, config.max_num_mixed_tokens, costs)
        self._on_preempt = on_preempt
        self.num_preemptions = 0
        self.reserving = SequenceQueue()
        self.receiving: list[Sequence] = []
        self.waiting = SequenceQueue()
        self.running = SequenceQueue()
        self._pool = pool
        self._shortage: BlockShortage | None = None  # of the queued sequence that last lacked blocks

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence. Its state says whether its KV will arrive from outside."""
        (self.reserving if sequence.state is SequenceState.RESERVING else self.waiting).push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from its queue and releases its blocks."""
        match sequence.state:
            case SequenceState.RESERVING:
                self.reserving.remove(sequence)
            case SequenceState.RECEIVING:
                self.receiving.remove(sequence)
            case SequenceState.WAITING:
                self.waiting.remove(sequence)
            case SequenceState.RUNNING:
                self.running.remove(sequence)
            case SequenceState.FINISHED:
                return
        sequence.state = SequenceState.FINISHED
        self._free_blocks(sequence)

    def reserve(self) -> list[Sequence]:
        """Reserves the blocks of sequences whose KV will arrive from outside, in order, until there is no room. Returns
        those that got theirs. A waiting sequence that lacks room gets it before any that comes after it, and the first
        one, which may wait for a step alone, keeps its room."""
        admitted: list[Sequence] = []
        if not self.reserving:
            return admitted
        lacking = next((sequence for sequence in self.waiting if sequence.lacks_room), None)
        claims = self._claims()
        while self.reserving:
            sequence = self.reserving.peek()
            if lacking is not None and lacking.order < sequence.order:
                break
            first = self.waiting.peek() if self.waiting and not self._reserves_first() else None
            has_place = self._has_place_for(sequence, claims.num_places, beside=first)
            if not has_place or not self._take_given_blocks(sequence, claims, beside=first):
                sequence.lacks_room = True
                break
            self.reserving.pop()
            sequence.state = SequenceState.RECEIVING
            self.receiving.append(sequence)
            claims.add(sequence)
            admitted.append(sequence)
        return admitted

    def first_lacking(self) -> int:
        """Returns the arrival number of the first queued sequence if it lacks blocks and may be overtaken, else 0."""
        if self.config.policy == "fcfs":
            return 0
        heads = [queue.peek() for queue in (self.waiting, self.reserving) if queue]
        first = min(heads, key=lambda sequence: sequence.order, default=None)
        if first is None or not first.lacks_room:
            return 0
        return first.arrival if self._has_place_for(first, self._claims().num_places) else 0

    def received(self, sequence: Sequence) -> None:
        """Moves a receiving sequence to the running ones: no more KV will arrive, and it computes what is missing."""
        self.receiving.remove(sequence)
        self.run(sequence)

    def run(self, sequence: Sequence) -> None:
        """Adds a sequence that holds its blocks to the running ones."""
        sequence.state = SequenceState.RUNNING
        sequence.lacks_room = False
        self.running.push(sequence)

    def prompts_wait(self, num_tokens: float) -> bool:
        """Tells whether more than `num_tokens` tokens wait for the steps of others alone, not for blocks or a place
        among the running, for which those behind the first one wait as well."""
        if self.waiting and (self.waiting.peek().lacks_room or self._reserves_first()):
            return False
        left = num_tokens
        for sequence in self.waiting:
            left -= sequence.num_missing_tokens
            if left < 0:
                return True
        return False

    def can_run_ahead(self) -> bool:
        """Tells whether the next step can be planned while one is in flight: no sampling reads a token that is still
        unknown, and no sequence has to be preempted, whose blocks would be free only after the step in flight."""
        num_blocks = 0
        for sequence in self.running:
            if sequence.waits_for_result:
                continue
            if sequence.num_unknown_tokens and reads_tokens(sequence.request.sampling):
                return False
            count = min(sequence.num_missing_tokens, self.config.max_num_batched_tokens)
            shared, num_new = self._blocks_to_take(sequence, count)
            num_blocks += len(shared) + num_new
        return num_blocks <= self._pool.num_free

    def schedule(self, *, on_borrowed_cores: bool = False) -> tuple[SchedulerOutput, list[Sequence]]:
        """Returns the next step's plan and its sequences, in the same order: running sequences first, then waiting
        ones, within the budget of tokens. `on_borrowed_cores`: the step has more cores than the node's own.
        """
        copies: list[tuple[int, int]] = []
        chosen: list[tuple[Sequence, int]] = []
        self._look_again()
        budget = self._schedule_running(chosen, copies, on_borrowed_cores=on_borrowed_cores)
        self._schedule_waiting(budget, chosen, copies)
        plan = SchedulerOutput(tuple(plan_entry(sequence, count) for sequence, count in chosen), tuple(copies))
        return plan, [sequence for sequence, _ in chosen]

    def _schedule_running(
        self, chosen: list[tuple[Sequence, int]], copies: list[tuple[int, int]], *, on_borrowed_cores: bool
    ) -> int:
        """Schedules running sequences and returns the budget that is left. A chunk of a prompt leaves one token of the
        budget for every decode after it, and up to a half of the rest for the next prompt if that is much shorter."""
        going_on = [(item, item.num_missing_tokens) for item in self.running if not item.waits_for_result]
        decodes_left = sum(num_missing == 1 for _, num_missing in going_on)
        waiting = () if self.waiting and self._reserves_first() else self.waiting
        prompts = chain((item for item, num_missing in going_on if num_missing > 1), waiting)
        prompt = next(prompts, None)
        num_queued = self._num_queued(prompt, going_on, waiting) if prompt is not None and decodes_left else 0
        budget = self._budget.num_tokens(prompt, decodes_left, num_queued, on_borrowed_cores=on_borrowed_cores)
        for sequence, num_missing in going_on:
            if sequence.state is not SequenceState.RUNNING:
                continue  # preempted for a sequence before it
            if num_missing == 1:
                decodes_left -= 1
                count = min(1, budget)  # never behind the decodes that come after it
            else:
                prompt = next(prompts, None)
                count = min(num_missing, without_share(budget - decodes_left, sequence, prompt))
            if count > 0 and self._grow_or_preempt(sequence, count, copies):
                chosen.append((sequence, count))
                budget -= count
        return budget

    def _num_queued(self, prompt: Sequence, going_on: list[tuple[Sequence, int]], waiting: Iterable[Sequence]) -> int:
        """Counts the prompts behind the first (`prompt`) that more tokens would let decode sooner: those that compute,
        and of the `waiting` ones as many as there are places for, unless the first of them lacks room. Those that are
        less urgent than any that decodes, or that are to yield to them, do not count, nor does any behind such a
        `prompt`, nor if a limit leaves them nothing."""
        if self.config.max_num_mixed_tokens:
            return 0
        most_urgent = min(item.priority for item, num_missing in going_on if num_missing == 1)

        def may_delay(item: Sequence) -> bool:
            return item.priority <= most_urgent and not item.request.yields_to_decodes

        if not may_delay(prompt):
            return 0
        num_prompts = sum(num_missing > 1 and may_delay(item) for item, num_missing in going_on)
        if self.waiting and not self.waiting.peek().lacks_room:
            num_places = self.config.max_num_seqs - self._claims().num_places
            num_prompts += sum(map(may_delay, islice(waiting, max(0, num_places))))
        return max(0, num_prompts - 1)

    def _schedule_waiting(self, budget: int, chosen: list[tuple[Sequence, int]], copies: list[tuple[int, int]]) -> None:
        """Schedules waiting sequences, in order, until there is no room or no budget. One that is still to reserve its
        blocks gets room before any that comes after it. The first one lacked room a moment ago or was preempted since
        if it `lacks_room`."""
        if not self.waiting or self.waiting.peek().lacks_room:
            return
        claims = self._claims()
        while self.waiting and budget > 0:
            sequence = self.waiting.peek()
            if self._reserves_first():
                break
            if not self._has_room_for(sequence, claims):
                sequence.lacks_room = True
                break
            count = self._begin(sequence, budget, copies)
            self.waiting.pop()
            self.run(sequence)
            claims.add(sequence)
            chosen.append((sequence, count))
            budget -= count

    def _look_again(self) -> None:
        """Notes that there is room now for the first waiting sequence. It begins only when a step has tokens left for
        it, but prompts before it then leave it some, and those that come later may reserve what it does not need."""
        if self.waiting and self.waiting.peek().lacks_room and not self._reserves_first():
            first = self.waiting.peek()
            first.lacks_room = not self._has_room_for(first, self._claims())

    def _reserves_first(self) -> bool:
        """Tells whether a sequence that is still to reserve its blocks comes before the first waiting one."""
        return bool(self.reserving) and self.reserving.peek().order < self.waiting.peek().order

    def _claims(self) -> Claims:
        return Claims(chain(self.running, self.receiving))

    def _has_room_for(self, sequence: Sequence, claims: Claims) -> bool:
        """Tells whether a waiting sequence could begin."""
        return self._has_place_for(sequence, claims.num_places) and self._has_blocks_for(
            sequence, num_kept=claims.num_blocks
        )

    def _begin(self, sequence: Sequence, budget: int, copies: list[tuple[int, int]]) -> int:
        """Gives a waiting sequence, for which there is room, the blocks for its first tokens. Returns how many tokens
        these are."""
        self._take_cached_blocks(sequence)
        count = min(sequence.num_missing_tokens, budget)
        has_grown = self._grow(sequence, count, copies)
        assert has_grown, "there were blocks for all its tokens"
        return count

    def _has_blocks_for(self, sequence: Sequence, *, num_kept: int) -> bool:
        """Tells whether there are blocks for all tokens of a queued sequence, with `num_kept` kept for others. Begun
        without them, it would be preempted and begin again, for as long as leases hold the blocks."""
        shortage = self._shortage
        if shortage is not None and shortage.persists(sequence, self._pool, num_kept=num_kept):
            return False
        self._shortage = find_shortage(sequence, self._pool, num_kept=num_kept)
        return self._shortage is None

    def _has_place_for(self, sequence: Sequence, num_places: int, *, beside: Sequence | None = None) -> bool:
        kept = 0 if beside is None else beside.width
        return num_places + kept + sequence.width <= self.config.max_num_seqs

    def _grow_or_preempt(self, sequence: Sequence, count: int, copies: list[tuple[int, int]]) -> bool:
        """Makes room for `count` more tokens, preempting running sequences from the last one on if necessary. Returns
        False if the sequence itself was preempted.
        """
        while not self._grow(sequence, count, copies):
            victim = self.running.last()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        assert not self._in_flight, "a launched step may need the blocks that preempting would free"
        self.running.remove(sequence)
        self._free_blocks(sequence)
        self._on_preempt(sequence)
        sequence.state = SequenceState.WAITING
        sequence.lacks_room = sequence.was_preempted = True
        self.waiting.push(sequence)
        self.num_preemptions += 1

    def _grow(self, sequence: Sequence, count: int, copies: list[tuple[int, int]]) -> bool:
        """Makes room for `count` tokens after the computed ones. Blocks that other sequences use are replaced by copies
        before they are written to (copy-on-write).

        Returns False, with the sequence unchanged, if the pool has too few blocks.
        """
        table = sequence.block_table
        shared, num_new = self._blocks_to_take(sequence, count)
        if not shared and not num_new:
            return True
        blocks = self._pool.allocate(len(shared) + num_new)
        if blocks is None:
            return False
        for index in shared:
            source, target = table[index], blocks.pop()
            copies.append((source, target))
            self._pool.pin([source])  # until the step is collected
            table[index] = target
            self._in_flight.release([source])
        table.extend(blocks)
        return True

    def _blocks_to_take(self, sequence: Sequence, count: int) -> tuple[list[int], int]:
        """Returns what `count` more tokens need: the indices in the block table of shared blocks that they are written
        to, and how many blocks the table lacks."""
        size = self.config.block_size
        first = sequence.next_position // size
        end = num_blocks_for(sequence.next_position + count, size)
        table = sequence.block_table
        shared = [i for i in range(first, min(end, len(table))) if self._pool.ref_count(table[i]) > 1]
        return shared, max(0, end - len(table))

    def _take_cached_blocks(self, sequence: Sequence) -> None:
        """Starts the block table with the blocks that are found by name. Those that a preempted sequence finds beyond
        the first time it has computed or received itself."""
        found = self._pool.lookup(sequence.block_hashes(sequence.num_cacheable_blocks))
        self._pool.acquire(found)
        sequence.block_table = array("i", found)
        sequence.num_named_blocks = len(found)
        sequence.num_computed_tokens = len(found) * self.config.block_size
        most = sequence.num_cached_tokens if sequence.was_preempted else sequence.num_computed_tokens
        sequence.num_cached_tokens = min(most, sequence.num_computed_tokens)

    def _take_given_blocks(self, sequence: Sequence, claims: Claims, *, beside: Sequence | None) -> bool:
        """Takes blocks for all given tokens. Returns False, holding none, if the pool has too few, or would then have
        too few for what is claimed, or for a queued sequence `beside` it on top of what it claims itself."""
        kept = 0
        if beside is not None:
            kept = num_blocks_for(beside.num_tokens, self.config.block_size) + num_blocks_ahead(sequence)
        if not self._has_blocks_for(sequence, num_kept=claims.num_blocks + kept):
            return False
        self._take_cached_blocks(sequence)
        num_blocks = num_blocks_for(sequence.num_given_tokens, self.config.block_size)
        blocks = self._pool.allocate(num_blocks - len(sequence.block_table))
        assert blocks is not None, "there were blocks for all its tokens"
        sequence.block_table.extend(blocks)
        return True

    def _free_blocks(self, sequence: Sequence) -> None:
        self._in_flight.release(sequence.block_table)
        sequence.block_table = array("i")
        sequence.num_named_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.prompt_logprobs = PromptLogprobs()
