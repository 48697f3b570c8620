"""Carries out a step's plan with a model: builds the flat tensors, runs the forward pass, samples. Never looks at the
scheduler.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from paged_kernels.base import AttentionMetadata
from torch import Tensor

from kvrelay.core.outputs import TokenLogprobs
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.plan import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, SequenceResult
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
    write to it.
    """

    def __init__(self, model: DecoderForCausalLM, sampler: TokenSampler, kv_pool: Tensor) -> None:
        self._model = model
        self._sampler = sampler
        self._kv_pool = kv_pool
        self._block_size = kv_pool.shape[4]

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for source, target in plan.copies:
            self._kv_pool[target].copy_(self._kv_pool[source])
        input_ids, positions, metadata = self._inputs(plan)
        hidden = self._model.forward(input_ids, positions, self._kv_pool, metadata)  # [num_tokens, hidden_size]
        sampled = self._sample(plan, hidden)
        return ModelRunnerOutput(tuple(self._results(plan, hidden, sampled)))

    def _inputs(self, plan: SchedulerOutput) -> tuple[Tensor, Tensor, AttentionMetadata]:
        scheduled = plan.scheduled
        counts = np.array([entry.num_scheduled_tokens for entry in scheduled], dtype=np.int32)
        starts = np.array([entry.start for entry in scheduled], dtype=np.int32)
        query_start_loc = np.zeros(len(scheduled) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        input_ids = np.concatenate([np.asarray(entry.token_ids, dtype=np.int64) for entry in scheduled])
        # Position of each token: its offset in its own chunk plus the chunk's start.
        offsets = np.arange(len(input_ids), dtype=np.int64)
        positions = offsets + np.repeat(starts - query_start_loc[:-1], counts)
        block_tables = np.zeros((len(scheduled), max(len(entry.block_table) for entry in scheduled)), dtype=np.int32)
        for row, entry in enumerate(scheduled):
            block_tables[row, : len(entry.block_table)] = entry.block_table
        owner = np.repeat(np.arange(len(scheduled)), counts)
        block_ids = block_tables[owner, positions // self._block_size].astype(np.int64)
        slot_mapping = block_ids * self._block_size + positions % self._block_size
        seq_lens = starts + counts
        metadata = AttentionMetadata(
            slot_mapping=torch.from_numpy(slot_mapping),
            block_tables=torch.from_numpy(block_tables),
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy(seq_lens),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
        )
        return torch.from_numpy(input_ids), torch.from_numpy(positions), metadata

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
        return [SequenceResult(tuple(next(tokens) for _ in entry.rows), ()) for entry in plan.scheduled]

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
