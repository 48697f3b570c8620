"""Carries out plans on a CPU: builds the flat tensors, runs the model, samples."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from paged_kernels.base import AttentionMetadata, LastTokens
from torch import Tensor

from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.engine.cpu.step_threads import StepThreads
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.plan import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, SequenceResult
from kvrelay.engine.sampling.logprobs import PROMPT_LOGPROB_ROWS, token_logprobs
from kvrelay.engine.sampling.sampler import SampledToken, Sampler
from kvrelay.engine.step_inputs import StepInputs, flatten, padded_tables


class CpuRunner:
    """The `Runner` of a CPU. `launch` computes at once: a launched step has written its KV. It samples when it is
    collected, or when a step is launched that reads its tokens.

    `kv_pool` is `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`. Only this class, its model and
    transfers write to it.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        sampler: Sampler,
        kv_pool: Tensor,
        threads: StepThreads | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._kv_pool = kv_pool
        self._block_size = kv_pool.shape[4]
        self._threads = threads or StepThreads()
        self._last: ComputedStep | None = None

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> "ComputedStep":
        last_sampled = self._last_sampled(plan)
        for source, target in plan.copies:
            self._kv_pool[target].copy_(self._kv_pool[source])
        input_ids, positions, metadata, inputs = self._inputs(plan, last_sampled)
        last = None if inputs.last_seqs is None else LastTokens.of(metadata, _tensor(inputs.last_seqs, np.int64))
        hidden = self._model.forward(
            input_ids, positions, self._kv_pool, metadata, last, before_layer=self._threads.before_layer
        )
        self._last = ComputedStep(partial(self._finish, plan, inputs, hidden))
        return self._last

    def _last_sampled(self, plan: SchedulerOutput) -> list[int]:
        """Returns one token for each row of the previous step's plan, or nothing if `plan` reads none of them: the
        previous step is then left to sample, or to fail, when it is collected."""
        if self._last is None or all(entry.input_row is None for entry in plan.scheduled):
            return []
        return self._last.sampled_tokens()

    @torch.inference_mode()
    def _finish(self, plan: SchedulerOutput, inputs: StepInputs, hidden: Tensor) -> ModelRunnerOutput:
        tokens = iter(self._sample(inputs, hidden))
        results = []
        first = 0
        for entry in plan.scheduled:
            logprobs = self._prompt_logprobs(entry, hidden, first)
            results.append(SequenceResult(tuple(islice(tokens, len(entry.rows))), logprobs))
            first += entry.num_scheduled_tokens
        return ModelRunnerOutput(tuple(results))

    def _inputs(
        self, plan: SchedulerOutput, last_sampled: Sequence[int]
    ) -> tuple[Tensor, Tensor, AttentionMetadata, StepInputs]:
        inputs = flatten(plan, self._block_size)
        input_ids = [
            token_id if row < 0 else last_sampled[row]
            for token_id, row in zip(inputs.token_ids, inputs.input_rows, strict=True)
        ]
        metadata = AttentionMetadata(
            slot_mapping=_tensor(inputs.slots, np.int64),
            block_tables=torch.from_numpy(padded_tables(inputs.block_tables)),
            query_start_loc=_tensor(inputs.query_start_loc, np.int32),
            seq_lens=_tensor(inputs.seq_lens, np.int32),
            max_query_len=max(entry.num_scheduled_tokens for entry in plan.scheduled),
            max_seq_len=max(inputs.seq_lens),
        )
        return _tensor(input_ids, np.int64), _tensor(inputs.positions, np.int64), metadata, inputs

    def _sample(self, inputs: StepInputs, hidden: Tensor) -> list[SampledToken]:
        if not inputs.rows:
            return []
        in_order = inputs.hidden_rows == list(range(len(hidden)))
        wanted = hidden if in_order else hidden[torch.tensor(inputs.hidden_rows)]
        return self._sampler.sample(self._model.compute_logits(wanted), inputs.rows)

    def _prompt_logprobs(self, entry: ScheduledSequence, hidden: Tensor, first: int) -> PromptLogprobs | None:
        """Returns what the sequence asks for, whose tokens have the rows of `hidden` from `first` on."""
        if entry.prompt_logprobs is None:
            return None
        k, targets = entry.prompt_logprobs
        found = PromptLogprobs()
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            chunk = targets[start : start + PROMPT_LOGPROB_ROWS]
            logits = self._model.compute_logits(hidden[first + start : first + start + len(chunk)])
            found.extend(token_logprobs(list(logits), chunk, k))
        return found


class ComputedStep:
    """A step that has gone through the model. `finish` is called once, and samples."""

    only_samples = True

    def __init__(self, finish: Callable[[], ModelRunnerOutput]) -> None:
        self._finish: Callable[[], ModelRunnerOutput] | None = finish
        self._output = ModelRunnerOutput(())

    def collect(self) -> ModelRunnerOutput:
        if self._finish is not None:
            self._output, self._finish = self._finish(), None
        return self._output

    def sampled_tokens(self) -> list[int]:
        """Returns one token for each row of the plan, any valid one for a row that has failed."""
        return [max(0, token.token_id) for result in self.collect().results for token in result.sampled]


def _tensor(values: Sequence[int], dtype: type[np.int32] | type[np.int64]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))  # takes a third of the time of torch.tensor
