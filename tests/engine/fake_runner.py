"""A runner without a model, whose KV is the tokens themselves. Any mistake with blocks therefore changes what it
samples.

The next token is a pure function of the tokens read back through the block table, which `expected_output` computes too.
The runner also checks the sampling rows against those tokens.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence

from kvrelay.engine.plan import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, SequenceResult
from kvrelay.engine.runner import LaunchedStep
from kvrelay.engine.sampling.penalties import reads_tokens
from kvrelay.engine.sampling.sampler import SampledToken, SamplingRow
from tests.engine.finished_step import FinishedStep
from tests.engine.runner_parts import resolved, result_of

VOCAB_SIZE = 1000


def next_token(context: Sequence[int], choice_index: int) -> int:
    digest = hashlib.sha256(repr((list(context), choice_index)).encode()).digest()
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def expected_output(prompt: Sequence[int], num_tokens: int, *, choice_index: int = 0) -> list[int]:
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context, choice_index))
    return context[len(prompt) :]


class SamplingStep(FinishedStep):
    """A launched step like that of `CpuRunner`: its blocks are written, its tokens come when it is collected."""

    only_samples = True


class FakeRunner:
    """A runner over lists of tokens: `pool[block_id][offset]` is the token whose KV would be there."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.block_size = block_size
        self.num_computed_tokens = 0
        self.num_prompt_logprobs = 0
        self.largest_step = 0
        self._last_sampled: list[int] = []

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        return SamplingStep(self._run(plan))

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        entries = [resolved(entry, self._last_sampled) for entry in plan.scheduled]
        for source, target in plan.copies:
            self.pool[target] = self.pool[source].copy()
        for entry in entries:
            self._write(entry)
        self.num_computed_tokens += plan.num_scheduled_tokens
        self.largest_step = max(self.largest_step, plan.num_scheduled_tokens)
        results = tuple(self._sample(entry) for entry in entries)
        self._last_sampled = [token.token_id for result in results for token in result.sampled]
        return ModelRunnerOutput(results)

    def _write(self, entry: ScheduledSequence) -> None:
        for offset, token_id in enumerate(entry.token_ids):
            block, slot = divmod(entry.start + offset, self.block_size)
            self.pool[entry.block_table[block]][slot] = token_id

    def _read(self, entry: ScheduledSequence) -> list[int]:
        context = []
        for position in range(entry.start + entry.num_scheduled_tokens):
            block, slot = divmod(position, self.block_size)
            token_id = self.pool[entry.block_table[block]][slot]
            assert token_id is not None, "attention over a slot that was never written"
            context.append(token_id)
        return context

    def _sample(self, entry: ScheduledSequence) -> SequenceResult:
        context = self._read(entry)
        if entry.prompt_logprobs is not None:
            self.num_prompt_logprobs += len(entry.prompt_logprobs[1])
        for row in entry.rows:
            self._check_row(row, context)
        sampled = tuple(SampledToken(next_token(context, row.choice_index), None) for row in entry.rows)
        return result_of(entry, sampled)

    def _check_row(self, row: SamplingRow, context: list[int]) -> None:
        assert row.position == len(context)
        assert row.fixed.biased_ids.tolist() == sorted(dict(row.params.biases))
        assert row.fixed.stop_token_ids == set(row.params.stop_token_ids)
        if reads_tokens(row.params):
            assert row.seen is not None
            counts = Counter(context[len(context) - row.num_output_tokens :])
            tokens = context if row.params.repetition_penalty != 1.0 else counts
            found = zip(row.seen.token_ids.tolist(), row.seen.output_counts.tolist(), strict=True)
            assert sorted(found) == sorted((token_id, counts[token_id]) for token_id in set(tokens))
