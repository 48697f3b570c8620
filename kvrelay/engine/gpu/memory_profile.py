"""How much of a GPU's memory is left for the pool. What the largest step needs is measured, not estimated.

Invariant: the engine's memory (weights, the largest step, recorded steps, pool, and an estimate of the CUDA context)
stays below its share of the GPU's memory, and below what is free when the pool is made.
"""

import logging
from dataclasses import dataclass, replace

import torch

from kvrelay.core.errors import ConfigurationError, ModelLoadError
from kvrelay.core.generation.sampling_params import MAX_LOGPROBS, SamplingParams
from kvrelay.core.kv.layout import KVLayout, num_blocks_for
from kvrelay.engine.gpu.runner import GpuRunner, StepLimits
from kvrelay.engine.gpu.sampler import GpuSampler
from kvrelay.engine.gpu.step_graphs import step_shapes
from kvrelay.engine.kv_pool import allocate_pool
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.plan import ScheduledSequence, SchedulerOutput
from kvrelay.engine.sampling.penalties import seen_tokens
from kvrelay.engine.sampling.sampler import NO_TOKEN, SamplingRow

DEFAULT_UTILIZATION = 0.9

_logger = logging.getLogger(__name__)
_GRAPH_BYTES = 8 << 20  # an estimate of the driver's memory for one recorded step
# An estimate of the CUDA context and the loaded kernels, which torch does not count. It cannot be measured where nodes
# share a GPU: the driver says how much of the GPU is in use, but not reliably by whom.
_CONTEXT_BYTES = 512 << 20
_GIB = 1 << 30
_ALL_THAT_CAN_BE_ASKED_FOR = SamplingParams(seed=0, top_k=50, top_p=0.9, repetition_penalty=1.1, logprobs=MAX_LOGPROBS)
# Products with quantised weights are launched differently for these numbers of rows.
_SHORTER_PROMPTS = (256, 128, 64, 32, 2)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """The memory of a GPU and what the engine needs of it, in bytes. `resident` is for the weights, `step` for the
    largest step besides them, and `graphs` is set aside for recorded steps. `free` was left when only the weights were
    loaded, whoever uses the rest."""

    total: int
    free: int
    resident: int
    step: int
    graphs: int

    def pool_bytes(self, utilization: float) -> int:
        """Returns how much the pool may take if the process may use the share `utilization` of the GPU's memory.
        Negative if even the rest does not fit."""
        needed = self.step + self.graphs
        share = int(self.total * utilization)
        return min(share - _CONTEXT_BYTES - self.resident, self.free) - needed


def blocks_that_fit(profile: MemoryProfile, layout: KVLayout, *, utilization: float, num_blocks: int) -> int:
    """Returns `num_blocks` if so many fit, and for 0 the number that fits. Raises ConfigurationError, which names the
    sizes, if they do not fit, or not even one does."""
    pool_bytes = profile.pool_bytes(utilization)
    wanted = max(1, num_blocks) * layout.block_bytes
    summary = (
        f"{profile.total / _GIB:.1f} GiB GPU of which {utilization:.0%} may be used and {profile.free / _GIB:.1f} GiB "
        f"are free; CUDA context {_CONTEXT_BYTES / _GIB:.1f} GiB, weights {profile.resident / _GIB:.1f} GiB, "
        f"the largest step {profile.step / _GIB:.1f} GiB, recorded steps {profile.graphs / _GIB:.1f} GiB"
    )
    if pool_bytes < wanted:
        asked = f"{num_blocks} KV blocks need" if num_blocks else "one KV block needs"
        raise ConfigurationError(
            f"{asked} {wanted / _GIB:.2f} GiB and {max(0, pool_bytes) / _GIB:.2f} GiB are left ({summary}); end what "
            "else uses the GPU, raise gpu_memory_utilization, or lower num_blocks, max_num_batched_tokens or "
            "max_num_seqs"
        )
    _logger.info("%s: %.1f GiB are left for KV", summary, pool_bytes / _GIB)
    return num_blocks or pool_bytes // layout.block_bytes


def largest_recorded_step(limits: StepLimits, block_size: int) -> SchedulerOutput:
    """Returns a plan with as many tokens and sequences as the largest recorded step."""
    shapes = step_shapes(limits.max_num_seqs, limits.max_num_batched_tokens)
    num_tokens = max(shape.num_tokens for shape in shapes)
    return largest_step(replace(limits, max_num_batched_tokens=num_tokens), block_size)


def graph_bytes(step_bytes: int, limits: StepLimits) -> int:
    """Returns the bytes to set aside for recorded steps, but for their results. They share the activations of the
    largest of them, which takes `step_bytes`."""
    return len(step_shapes(limits.max_num_seqs, limits.max_num_batched_tokens)) * _GRAPH_BYTES + step_bytes


def _result_bytes(model: DecoderForCausalLM, limits: StepLimits) -> int:
    """Returns the bytes of the results of recorded steps, each of which keeps its own: a row for each token."""
    num_rows = sum(shape.num_tokens for shape in step_shapes(limits.max_num_seqs, limits.max_num_batched_tokens))
    return num_rows * model.config.hidden_size * model.dtype.itemsize


def largest_step(limits: StepLimits, block_size: int) -> SchedulerOutput:
    """Returns the plan that needs most memory: as many tokens and as many sampled rows as a step may have, with all
    log-probabilities, and all in block 0. A long prompt computes many log-probabilities at a time, so the first prompts
    are as long as possible. Parallel outputs of the first one make up for sampled rows that lack a sequence."""
    num_seqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    num_left = limits.max_num_batched_tokens
    entries: list[ScheduledSequence] = []
    for others in reversed(range(num_seqs)):
        length = min(num_left - others, limits.max_model_len - 1)
        num_left -= length
        num_rows = 1 if entries else 1 + limits.max_num_seqs - num_seqs
        entries.append(_prompt(length, length, block_size, num_rows=num_rows, all_stay=True))
    return SchedulerOutput(tuple(entries), ())


def smaller_steps(limits: StepLimits, block_size: int) -> list[SchedulerOutput]:
    """Returns plans that launch a prompt's attention and products in every way, so that all kernels are compiled before
    a request waits for them. They are prompts of several lengths, alone and together with a decode, whose tokens all
    stay until the end of the step; a whole chunk at the end of the longest prompt; and the ends of ever shorter ones,
    whose last layer attends with one token or with all. Recorded steps are compiled when they are recorded."""
    longest = max(1, min(limits.max_num_batched_tokens - 1, limits.max_model_len - 1))
    plans = []
    for length in sorted({min(length, longest) for length in (*_SHORTER_PROMPTS, longest)}, reverse=True):
        prompt = _prompt(length, length, block_size, num_rows=0, all_stay=True)
        plans.append(SchedulerOutput((prompt,), ()))
        if min(limits.max_num_seqs, limits.max_num_batched_tokens) > 1:
            plans.append(SchedulerOutput((ScheduledSequence((0,), 0, (0,), ()), prompt), ()))
    end = limits.max_model_len - 1
    if end > 1:
        whole_chunk = _prompt(min(end, limits.max_num_batched_tokens), end, block_size, num_rows=1, all_stay=True)
        plans.append(SchedulerOutput((whole_chunk,), ()))
    while limits.max_num_batched_tokens > 1 < end:
        for all_stay in (False, True):
            plans.append(SchedulerOutput((_prompt(2, end, block_size, num_rows=1, all_stay=all_stay),), ()))
        end //= 2
    return plans


def _prompt(num_new: int, length: int, block_size: int, *, num_rows: int, all_stay: bool) -> ScheduledSequence:
    """Returns the last `num_new` tokens of a prompt of `length`. With `all_stay`, log-probabilities of the prompt keep
    all tokens in the step until its end."""
    row = SamplingRow(_ALL_THAT_CAN_BE_ASKED_FOR, 0, length, 0, seen_tokens(_ALL_THAT_CAN_BE_ASKED_FOR, (0,)))
    return ScheduledSequence(
        token_ids=(0,) * num_new,
        start=length - num_new,
        block_table=(0,) * num_blocks_for(length, block_size),
        rows=(row,) * num_rows,
        prompt_logprobs=(MAX_LOGPROBS, (0,) * (num_new - 1)) if all_stay else None,
    )


def profile_memory(
    model: DecoderForCausalLM, sampler: GpuSampler, layout: KVLayout, limits: StepLimits, *, graphs: bool
) -> MemoryProfile:
    """Measures the largest step by running it, and smaller ones as well: they compile kernels that it does not use, and
    have longer prefixes, which the reference's attention copies. Raises ModelLoadError if a step has no valid result.
    If memory runs out, raises an error that `out_of_memory_as_configuration_error` recognises."""
    device = model.device
    torch.cuda.empty_cache()
    resident = torch.cuda.memory_reserved(device)
    runner = GpuRunner(model, sampler, allocate_pool(layout, 1, device), limits)
    plans = (largest_step(limits, layout.block_size), *smaller_steps(limits, layout.block_size))
    step = max(_peak_bytes(device, runner, plan) for plan in plans) - resident
    reserved = 0
    if graphs:
        recorded = _peak_bytes(device, runner, largest_recorded_step(limits, layout.block_size)) - resident
        reserved = graph_bytes(recorded, limits) + _result_bytes(model, limits)
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryProfile(total, free, resident, step, reserved)


def _peak_bytes(device: torch.device, runner: GpuRunner, plan: SchedulerOutput) -> int:
    """Runs a step. Returns the most memory that this process had reserved meanwhile."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    _run(runner, plan)
    return torch.cuda.max_memory_reserved(device)


def _run(runner: GpuRunner, plan: SchedulerOutput) -> None:
    launched = runner.launch(plan)
    results = launched.collect().results
    if any(sampled.token_id == NO_TOKEN for result in results for sampled in result.sampled):
        raise ModelLoadError(
            f"a step of {plan.num_scheduled_tokens} tokens, run to measure its memory, gave logits that are not "
            "finite: the checkpoint is damaged, its activations overflow its dtype (bfloat16 has the range of "
            "float32), or a kernel is wrong on this GPU (attention_backend reference avoids those of attention)"
        )
