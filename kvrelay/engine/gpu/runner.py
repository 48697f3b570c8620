"""Carries out plans on a GPU: a step's inputs are copied at once, all its work is enqueued, and the host waits once per
step, when the sampled tokens are collected.

Invariant: nothing between `launch` and `collect` reads from the GPU. All work runs in the order of one stream. A step
may therefore read what the step before it samples, and memory may be reused once its last use has been enqueued.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np
import torch
from paged_kernels.base import AttentionMetadata, LastTokens
from torch import Tensor

from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.kv.layout import num_blocks_for
from kvrelay.engine.gpu.logprobs import LaunchedLogprobs, launch_logprobs
from kvrelay.engine.gpu.packed_arrays import PackedArrays
from kvrelay.engine.gpu.sampler import GpuSampler, LaunchedSampling
from kvrelay.engine.gpu.step_graphs import Step, StepGraphs, StepRecorder, StepShape, step_shapes
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.out_of_memory import GpuMemoryError, is_out_of_memory
from kvrelay.engine.plan import ModelRunnerOutput, ScheduledSequence, SchedulerOutput, SequenceResult
from kvrelay.engine.sampling.logprobs import PROMPT_LOGPROB_ROWS
from kvrelay.engine.step_inputs import Array, StepInputs, flatten

# The room for a row's sampling parameters in the memory that recorded steps read. What penalties and biases need beyond
# that may use what block tables narrower than the widest leave. Only a step that still does not fit is not replayed.
# There is room for one row more than there are, since each of about 16 arrays takes at least 16 bytes.
_SAMPLING_BYTES = 128


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits that no plan exceeds."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class GpuRunner:
    """The `Runner` of a GPU, or of a CPU with Triton interpreted. `kv_pool` is that of `CpuRunner`.

    With a `recorder`, steps of all `step_shapes` are recorded here, and replayed later.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        sampler: GpuSampler,
        kv_pool: Tensor,
        limits: StepLimits,
        recorder: StepRecorder | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._kv_pool = kv_pool
        self._limits = limits
        self._block_size = kv_pool.shape[4]
        self._table_width = num_blocks_for(limits.max_model_len, self._block_size)
        # What the previous step sampled, one token for each row of its plan; -1 for a row that failed.
        self._last_sampled = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=kv_pool.device)
        # Memory that recorded steps read: their inputs, and block tables of the greatest width. A step fills only the
        # part it needs; what earlier steps have left in the rest is beyond the end of every sequence.
        self._inputs = torch.zeros(0, dtype=torch.uint8, device=kv_pool.device)
        self._tables = torch.zeros(0, self._table_width, dtype=torch.int32, device=kv_pool.device)
        self._graphs: StepGraphs | None = None
        if recorder is not None:
            self._record(recorder)

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> "GpuStep":
        try:
            return self._launch(plan)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if self._kv_pool.is_cuda:
                # The part that was enqueued may still write to the step's blocks.
                torch.cuda.current_stream(self._kv_pool.device).synchronize()
            raise GpuMemoryError(
                f"the GPU has no memory for a step of {plan.num_scheduled_tokens} tokens; lower "
                f"gpu_memory_utilization or max_num_batched_tokens ({error})"
            ) from error

    def _launch(self, plan: SchedulerOutput) -> "GpuStep":
        for source, target in plan.copies:
            self._kv_pool[target].copy_(self._kv_pool[source], non_blocking=True)
        inputs, packed, shape = self._prepare(plan)
        memory = self._empty(packed.num_bytes) if shape is None else self._inputs
        packed.to(memory)
        tensors = packed.views(memory)
        if shape is not None and self._graphs is not None:
            tables = tensors["block_tables"]
            self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
            hidden = self._graphs.replay(shape)
        else:
            unknown = any(row >= 0 for row in inputs.input_rows)
            longest = max(entry.num_scheduled_tokens for entry in plan.scheduled)
            hidden = self._forward(tensors, longest, max(inputs.seq_lens), resolve=unknown)
        sampled = self._sample(inputs, hidden, tensors)
        prompt_logprobs = self._prompt_logprobs(plan, hidden, tensors)
        return GpuStep(plan.scheduled, sampled, prompt_logprobs, _mark(self._kv_pool.device))

    def _prepare(self, plan: SchedulerOutput) -> tuple[StepInputs, PackedArrays, StepShape | None]:
        """Returns a step's inputs, as lists and packed, and the shape of the recorded step that they are padded to, or
        None if there is none or they are too large for it."""
        inputs = flatten(plan, self._block_size)
        shape = None if self._graphs is None else self._graphs.shape_for(inputs.num_tokens, inputs.num_seqs)
        if shape is not None:
            all_tokens = inputs.with_all_tokens()
            packed = PackedArrays(self._arrays(plan, all_tokens, shape))
            if packed.num_bytes <= len(self._inputs):
                return all_tokens, packed, shape
        return inputs, PackedArrays(self._arrays(plan, inputs, None)), None

    def _arrays(self, plan: SchedulerOutput, inputs: StepInputs, shape: StepShape | None) -> dict[str, Array]:
        """Returns all arrays that travel to the GPU, by name. Those that recorded steps read come first, at places that
        never change; the block tables after them vary in width."""
        arrays = inputs.arrays() if shape is None else _padded(inputs, shape)
        if inputs.rows:
            arrays["hidden_rows"] = np.array(inputs.hidden_rows, dtype=np.int64)
            arrays |= self._sampler.arrays(inputs.rows)
        if inputs.last_seqs is not None:
            arrays["last_seqs"] = np.array(inputs.last_seqs, dtype=np.int64)
        targets = [target for entry in plan.scheduled if entry.prompt_logprobs for target in entry.prompt_logprobs[1]]
        if targets:
            arrays["targets"] = np.array(targets, dtype=np.int64)
        return arrays

    def _forward(self, tensors: Mapping[str, Tensor], max_query_len: int, max_seq_len: int, *, resolve: bool) -> Tensor:
        """Runs the model and returns the final hidden states, one row per token, or per sequence in `last_seqs` if that
        is given. With `resolve`, unknown tokens are taken from the previous step's samples."""
        token_ids = tensors["token_ids"]
        if resolve:
            before = self._last_sampled[tensors["input_rows"]].clamp(min=0)
            token_ids = torch.where(tensors["known"], token_ids, before)
        metadata = AttentionMetadata(
            slot_mapping=tensors["slots"],
            block_tables=tensors["block_tables"],
            query_start_loc=tensors["query_start_loc"],
            seq_lens=tensors["seq_lens"],
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )
        last = LastTokens.of(metadata, tensors["last_seqs"]) if "last_seqs" in tensors else None
        return self._model.forward(token_ids, tensors["positions"], self._kv_pool, metadata, last)

    def _sample(self, inputs: StepInputs, hidden: Tensor, tensors: Mapping[str, Tensor]) -> LaunchedSampling | None:
        num_rows = len(inputs.rows)
        if not num_rows:
            return None
        in_order = inputs.hidden_rows == list(range(num_rows))
        wanted = hidden[:num_rows] if in_order else hidden[tensors["hidden_rows"]]
        logits = self._model.compute_logits(wanted)
        return self._sampler.launch(logits, inputs.rows, tensors, self._last_sampled[:num_rows])

    def _prompt_logprobs(
        self, plan: SchedulerOutput, hidden: Tensor, tensors: Mapping[str, Tensor]
    ) -> list[list[LaunchedLogprobs]]:
        """Enqueues the log-probabilities of prompts. Returns one list per scheduled sequence."""
        found: list[list[LaunchedLogprobs]] = []
        first_token = first_target = 0
        for entry in plan.scheduled:
            slices: list[LaunchedLogprobs] = []
            k, targets = entry.prompt_logprobs or (0, ())
            for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
                count = min(PROMPT_LOGPROB_ROWS, len(targets) - start)
                logits = self._model.compute_logits(hidden[first_token + start : first_token + start + count])
                ids = tensors["targets"][first_target + start : first_target + start + count]
                slices.append(launch_logprobs(logits, ids, [k] * count))
            found.append(slices)
            first_token += entry.num_scheduled_tokens
            first_target += len(targets)
        return found

    @torch.inference_mode()
    def _record(self, recorder: StepRecorder) -> None:
        shapes = step_shapes(self._limits.max_num_seqs, self._limits.max_num_batched_tokens)
        padding = flatten(SchedulerOutput((_PADDING,), ()), self._block_size)
        arrays = {shape: _padded(padding, shape) for shape in shapes}
        for of_shape in arrays.values():  # the only sequence of the plan becomes padding, too
            of_shape["slots"][:] = -1
            of_shape["seq_lens"][:] = 0
        packed = {shape: PackedArrays(of_shape) for shape, of_shape in arrays.items()}
        largest = max(one.num_bytes for one in packed.values())
        num_rows = self._limits.max_num_seqs
        self._tables = self._tables.new_zeros(num_rows, self._table_width)
        self._inputs = self._empty(largest + self._tables.nbytes + (num_rows + 1) * _SAMPLING_BYTES)

        def step_of(shape: StepShape) -> Step:
            packed[shape].to(self._inputs)
            tensors = packed[shape].views(self._inputs) | {"block_tables": self._tables[: shape.num_seqs]}
            return lambda: self._forward(tensors, shape.longest_query, self._limits.max_model_len, resolve=True)

        self._graphs = StepGraphs(recorder, shapes, step_of)

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._kv_pool.device)


_PADDING = ScheduledSequence((0,), 0, (0,), ())


def _padded(inputs: StepInputs, shape: StepShape) -> dict[str, Array]:
    return inputs.arrays(num_tokens=shape.num_tokens, num_seqs=shape.num_seqs)


@dataclass(frozen=True, slots=True)
class GpuStep:
    """The `LaunchedStep` of a GPU. `end` is None if the launch computes everything, on a CPU."""

    only_samples: ClassVar[bool] = False
    scheduled: tuple[ScheduledSequence, ...]
    sampled: LaunchedSampling | None
    prompt_logprobs: list[list[LaunchedLogprobs]]
    end: torch.cuda.Event | None

    def collect(self) -> ModelRunnerOutput:
        if self.end is not None:
            self.end.synchronize()
        tokens = iter(() if self.sampled is None else self.sampled.collect())
        return ModelRunnerOutput(
            tuple(
                SequenceResult(tuple(islice(tokens, len(entry.rows))), _joined(slices))
                for entry, slices in zip(self.scheduled, self.prompt_logprobs, strict=True)
            )
        )


def _joined(slices: Sequence[LaunchedLogprobs]) -> PromptLogprobs | None:
    if not slices:
        return None
    found = PromptLogprobs()
    for launched in slices:
        found.extend(launched.columns())
    return found


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """Returns an event at the end of what has been enqueued so far, or None on a CPU."""
    if device.type != "cuda":
        return None
    end = torch.cuda.Event()  # type: ignore[no-untyped-call]
    end.record(torch.cuda.current_stream(device))
    return end
