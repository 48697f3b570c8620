"""Stand-ins for the model and for the engine's thread. Everything between them is the real engine.

Invariant: the runner reads every byte of a sequence's KV, and raises an error if one is not what the tokens in that KV
make it. Right KV of other tokens makes it sample other tokens, which the client notices.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial

from kvrelay.core.errors import KVRelayError
from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.engine.engine import Engine
from kvrelay.engine.engine_thread import EngineThread, Message
from kvrelay.engine.plan import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, SequenceResult
from kvrelay.engine.runner import LaunchedStep, Runner
from kvrelay.engine.sampling.sampler import SampledToken, SamplingRow
from kvrelay.engine.sampling.seen_tokens import SeenTokens
from kvrelay.engine.step_result import StepResult
from tests.engine.finished_step import FinishedStep
from tests.engine.runner_parts import resolved, result_of
from tests.simulation.oracle import FIRST_STATE, SLOT_BYTES, next_slot, sample, slots_of, tokens_in

STEP_FAILED = "injected: a step has failed"


class WrongKVError(AssertionError):
    """A sequence was about to be continued from wrong KV."""


class SamplingStep:
    """A launched step whose KV is written, and that samples when it is collected."""

    only_samples = True

    def __init__(self, sample: Callable[[], ModelRunnerOutput]) -> None:
        self.collect = sample


class DigestRunner:
    """Implements Runner over the pool's `memory`: block i has `block_size` slots of SLOT_BYTES, from the first byte.
    With `samples_later`, a step is left with only its sampling to do when it is launched, as on a CPU."""

    def __init__(self, memory: memoryview, block_size: int, *, samples_later: bool = False) -> None:
        self._samples_later = samples_later
        self._memory = memory
        self._block_size = block_size
        self._block_bytes = block_size * SLOT_BYTES
        self._last_sampled: list[int] = []

    def launch(self, plan: SchedulerOutput) -> FinishedStep | SamplingStep:
        entries = [resolved(entry, self._last_sampled) for entry in plan.scheduled]
        for source, target in plan.copies:
            self._memory[self._block(target)] = self._memory[self._block(source)]
        for entry in entries:
            self._write(entry)
        if self._samples_later:
            return SamplingStep(partial(self._sample_all, entries))
        return FinishedStep(self._sample_all(entries))

    def _sample_all(self, entries: Sequence[ScheduledSequence]) -> ModelRunnerOutput:
        results = tuple(self._sample(entry) for entry in entries)
        self._last_sampled = [token.token_id for result in results for token in result.sampled]
        return ModelRunnerOutput(results)

    def _write(self, entry: ScheduledSequence) -> None:
        state = self._read(entry, entry.start - 1) if entry.start else FIRST_STATE
        for offset, token_id in enumerate(entry.token_ids):
            state = next_slot(state, token_id)
            self._memory[self._slot(entry, entry.start + offset)] = state

    def _sample(self, entry: ScheduledSequence) -> SequenceResult:
        return result_of(entry, tuple(self._sample_row(entry, row) for row in entry.rows))

    def _sample_row(self, entry: ScheduledSequence, row: SamplingRow) -> SampledToken:
        num_tokens = entry.start + entry.num_scheduled_tokens
        assert row.position == num_tokens
        found = b"".join(bytes(self._memory[self._block(block_id)]) for block_id in entry.block_table)
        found = found[: num_tokens * SLOT_BYTES]
        expected = slots_of(tokens_in(found))
        if found != expected:
            wrong = next(i for i in range(num_tokens) if found[i * 16 : i * 16 + 16] != expected[i * 16 : i * 16 + 16])
            raise WrongKVError(
                f"KV of token {wrong} of {num_tokens} in block {entry.block_table[wrong // self._block_size]}"
            )
        token_id = sample(
            found, row.params, row.choice_index, num_output_tokens=row.num_output_tokens, seen=_counts(row.seen)
        )
        logprobs = None if row.params.logprobs is None else TokenLogprobs(token_id, -1.0, 1)
        return SampledToken(token_id, logprobs)

    def _block(self, block_id: int) -> slice:
        return slice(block_id * self._block_bytes, (block_id + 1) * self._block_bytes)

    def _slot(self, entry: ScheduledSequence, position: int) -> slice:
        block, slot = divmod(position, self._block_size)
        start = entry.block_table[block] * self._block_bytes + slot * SLOT_BYTES
        return slice(start, start + SLOT_BYTES)

    def _read(self, entry: ScheduledSequence, position: int) -> bytes:
        return bytes(self._memory[self._slot(entry, position)])


class FailingRunner:
    """A runner that fails some steps of `inner` when they are launched or, unless they are launched ahead of others,
    when they are collected."""

    def __init__(self, inner: Runner, fails: Callable[[], bool], *, run_ahead: bool) -> None:
        self._inner = inner
        self._fails = fails
        self._run_ahead = run_ahead

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        if self._fails():
            raise KVRelayError(STEP_FAILED)
        step = self._inner.launch(plan)
        return step if self._run_ahead or not self._fails() else FailingStep(step.only_samples)


class FailingStep:
    """A launched step that has no result."""

    def __init__(self, only_samples: bool) -> None:
        self.only_samples = only_samples

    def collect(self) -> ModelRunnerOutput:
        raise KVRelayError(STEP_FAILED)


def _counts(seen: SeenTokens | None) -> dict[int, int] | None:
    """Returns what penalties read, as the oracle has it."""
    return None if seen is None else dict(zip(seen.token_ids.tolist(), seen.output_counts.tolist(), strict=True))


class VirtualEngineThread(EngineThread):
    """An engine thread whose turns are callbacks of the loop: messages, a step, and its result after `step_seconds`.
    `on_failure` is called with a crash, which is an error of the code under test."""

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        *,
        on_result: Callable[[StepResult], None],
        on_crash: Callable[[BaseException], None],
        context: Context,
        step_seconds: Callable[[], float],
        on_failure: Callable[[BaseException], None],
        stream_interval: float,
    ) -> None:
        super().__init__(engine, loop, on_result=on_result, on_crash=on_crash, stream_interval=stream_interval)
        self._context = context
        self._step_seconds = step_seconds
        self._on_failure = on_failure
        self._is_idle = False  # and looks up at the next message

    def start(self) -> None:
        self._is_idle = True
        self._look_up()

    def post(self, message: Message) -> None:
        super().post(message)
        self._look_up()

    async def stop(self, timeout: float) -> None:
        self._mailbox.put(None)
        self._look_up()
        async with asyncio.timeout(timeout):
            while not self._stopped.is_set():
                await asyncio.sleep(0.01)

    def _look_up(self) -> None:
        if self._is_idle:
            self._is_idle = False
            self._loop.call_soon(self._turn, context=self._context)

    def _turn(self) -> None:
        try:
            if not self._handle_messages(0.0):
                self._engine.settle()
                self._end()
                return
            result, busy = self._engine.step()
        except Exception as error:
            self._on_failure(error)
            self._on_crash(error)
            self._end()
            return
        seconds = self._step_seconds() if busy else 0.0
        self._loop.call_later(seconds, self._after_step, result, busy, context=self._context)

    def _after_step(self, result: StepResult | None, busy: bool) -> None:
        self._result = result
        self._hand_over()
        if busy or not self._mailbox.empty():
            self._turn()
        else:
            self._is_idle = True

    def _end(self) -> None:
        self._stopped.set()
        self._fail_pending()
