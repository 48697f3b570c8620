"""Carries out a step's plan with a model: builds the flat tensors, runs the forward pass, samples. Never looks at the
scheduler.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from paged_kernels.base import AttentionMetadata
from torch import Tensor

from kvrelay.core.outputs import TokenLogprobs
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.plan import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, SequenceResult
from kvrelay.engine.runner import FinishedStep
from kvrelay.engine.sampler import SampledToken, SamplingRow, prompt_logprobs

_LOGPROB_ROWS = (
    128  # prompt log-probabilities are computed in slices, since a row of logits is as long as the vocabulary
)


class TokenSampler(Protocol):
    """`Sampler`, or `DeviceSampler` where logits are on a GPU."""

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """One token per row of `logits` `[len(rows), vocab_size]` float32."""
        ...


class ModelRunner:
    """`kv_pool` is `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`; only this class and its model
    write to it. On the CPU, where nothing runs beside the caller: a launched step is finished.
    """

    def __init__(self, model: DecoderForCausalLM, sampler: TokenSampler, kv_pool: Tensor) -> None:
        self._model = model
        self._sampler = sampler
        self._kv_pool = kv_pool
        self._block_size = kv_pool.shape[4]
        self._last_sampled: list[int] = []  # by the step before, one token for each row of its plan

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> FinishedStep:
        for source, target in plan.copies:
            self._kv_pool[target].copy_(self._kv_pool[source])
        input_ids, positions, metadata = self._inputs(plan)
        hidden = self._model.forward(input_ids, positions, self._kv_pool, metadata)  # [num_tokens, hidden_size]
        sampled = self._sample(plan, hidden)
        self._last_sampled = [token.token_id for result in sampled for token in result.sampled]
        return FinishedStep(ModelRunnerOutput(tuple(self._results(plan, hidden, sampled))))

    def _inputs(self, plan: SchedulerOutput) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Lists first, and one array of each: most steps have a few tokens only, for which numpy costs more than it
        saves."""
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start_loc = [0]
        seq_lens: list[int] = []
        size = self._block_size
        for entry in plan.scheduled:
            table, start = entry.block_table, entry.start
            end = start + entry.num_scheduled_tokens
            input_ids += entry.token_ids if entry.input_row is None else [self._last_sampled[entry.input_row]]
            positions += range(start, end)
            slots += [table[position // size] * size + position % size for position in range(start, end)]
            query_start_loc.append(len(input_ids))
            seq_lens.append(end)
        metadata = AttentionMetadata(
            slot_mapping=_tensor(slots, np.int64),
            block_tables=_padded([entry.block_table for entry in plan.scheduled]),
            query_start_loc=_tensor(query_start_loc, np.int32),
            seq_lens=_tensor(seq_lens, np.int32),
            max_query_len=max(entry.num_scheduled_tokens for entry in plan.scheduled),
            max_seq_len=max(seq_lens),
        )
        return _tensor(input_ids, np.int64), _tensor(positions, np.int64), metadata

    def _sample(self, plan: SchedulerOutput, hidden: Tensor) -> list[SequenceResult]:
        """One result per scheduled sequence, without prompt log-probabilities."""
        rows: list[SamplingRow] = []
        last_tokens: list[int] = []  # row of `hidden` for each sampling row; parallel outputs share one
        end = 0
        for entry in plan.scheduled:
            end += entry.num_scheduled_tokens
            rows.extend(entry.rows)
            last_tokens.extend([end - 1] * len(entry.rows))
        tokens: Iterator[SampledToken] = iter(())
        if rows:
            every_token = last_tokens == list(range(len(hidden)))  # a batch of decodes
            wanted = hidden if every_token else hidden[torch.tensor(last_tokens)]
            tokens = iter(self._sampler.sample(self._model.compute_logits(wanted), rows))
        return [SequenceResult(tuple(islice(tokens, len(entry.rows))), ()) for entry in plan.scheduled]

    def _results(self, plan: SchedulerOutput, hidden: Tensor, sampled: list[SequenceResult]) -> list[SequenceResult]:
        if all(entry.prompt_logprobs is None for entry in plan.scheduled):
            return sampled
        results = []
        first = 0
        for entry, result in zip(plan.scheduled, sampled, strict=True):
            logprobs = self._prompt_logprobs(entry, hidden[first : first + entry.num_scheduled_tokens])
            results.append(SequenceResult(result.sampled, logprobs))
            first += entry.num_scheduled_tokens
        return results

    def _prompt_logprobs(self, entry: ScheduledSequence, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        if entry.prompt_logprobs is None:
            return ()
        k, targets = entry.prompt_logprobs
        found: list[TokenLogprobs] = []
        for start in range(0, len(targets), _LOGPROB_ROWS):
            chunk = targets[start : start + _LOGPROB_ROWS]
            found.extend(prompt_logprobs(self._model.compute_logits(hidden[start : start + len(chunk)]), chunk, k))
        return tuple(found)


def _tensor(values: Sequence[int], dtype: type[np.int32] | type[np.int64]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))  # a third of the time of torch.tensor


def _padded(block_tables: Sequence[Sequence[int]]) -> Tensor:
    """`[num_seqs, max_num_blocks]` int32, padded with 0."""
    padded = np.zeros((len(block_tables), max(map(len, block_tables))), dtype=np.int32)
    for row, block_table in zip(padded, block_tables, strict=True):
        row[: len(block_table)] = block_table
    return torch.from_numpy(padded)
