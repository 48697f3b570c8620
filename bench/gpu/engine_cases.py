"""The whole engine on a GPU, with scheduler and sampling: seconds of a decode step, of a prompt, and of a batch from
beginning to end, compared with what the GPU's copy bandwidth and matrix rate allow, and with transformers.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from paged_kernels.reference import ReferenceBackend
from transformers import PreTrainedConfig

from bench.gpu.eager_recorder import EagerRecorder
from bench.gpu.greedy import greedy_error, likeliest_error
from bench.gpu.kernel_times import time_by_kernel
from bench.gpu.measure import Rates, never_waiting
from bench.gpu.random_decoder import random_decoder
from bench.gpu.report import Result
from bench.gpu.task import Task, attempt
from bench.gpu.transformers_peer import generate_with_transformers
from bench.timing import wall_seconds
from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.engine.block_pool import BlockPool
from kvrelay.engine.engine import Engine
from kvrelay.engine.gpu.runner import GpuRunner, StepLimits
from kvrelay.engine.gpu.sampler import GpuSampler
from kvrelay.engine.gpu.step_graphs import CudaGraphRecorder
from kvrelay.engine.plan import ScheduledSequence, SchedulerOutput
from kvrelay.engine.request import EngineRequest
from kvrelay.engine.sampling.sampler import SamplingRow
from kvrelay.engine.scheduler import SchedulerConfig

_logger = logging.getLogger(__name__)
_BLOCK_SIZE = 16
_WARMUP_STEPS = 3
_PROFILED_STEPS = 4
_MOST_CHECKED = 32  # requests of a measurement, each of which plain torch needs a tenth of a second for


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What is measured of one model: `decode` lists (batch, context), of which `steps` steps are timed; `mixed` lists
    (decodes, tokens of a prompt) of single steps, and `prefill` the tokens of single prompts, of which the best of
    `repeats` counts; `batch` is (prompts, tokens of each, new tokens), timed from beginning to end."""

    name: str
    config: PreTrainedConfig
    decode: tuple[tuple[int, int], ...]
    mixed: tuple[tuple[int, int], ...]
    prefill: tuple[int, ...]
    batch: tuple[int, int, int]
    steps: int
    repeats: int
    limits: StepLimits

    @property
    def num_blocks(self) -> int:
        """Returns the size of a pool for the largest of the batches, including the tokens that its sequences add."""
        count, prompt, new = self.batch
        tokens = [batch * (context + self._most_tokens(batch, context)) for batch, context in self.decode]
        return (max(*tokens, count * (prompt + new), *self.prefill) // _BLOCK_SIZE) + 2 * self.limits.max_num_seqs

    def _most_tokens(self, batch: int, context: int) -> int:
        """Returns how many tokens a sequence may add while the others' prompts are computed, and while it is timed."""
        steps = self.steps + _WARMUP_STEPS + _PROFILED_STEPS
        return 2 * (batch * context // self.limits.max_num_batched_tokens + 2) + steps + 8

    def sampling_for(self, batch: int, context: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, seed=0, ignore_eos=True, max_tokens=self._most_tokens(batch, context))


@dataclass(frozen=True, slots=True)
class Measured:
    """A time, and the `error` of the tokens that were made. `parts` are the kernels that took most of a step, in
    seconds; for the rest of `seconds` the GPU has waited."""

    seconds: float
    error: float
    parts: Mapping[str, float] = field(default_factory=dict)


class EngineBench:
    """One model with its pool and its recorded steps, which all measurements use. Prompts never repeat, so that none is
    found in the pool by name.

    A measurement that fails leaves the engine in an unknown state. The next one then starts with a new engine over the
    same pool.
    """

    def __init__(self, plan: EnginePlan, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._plan = plan
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)
        limits = plan.limits
        self.model = random_decoder(plan.config, max_model_len=limits.max_model_len, dtype=dtype, device=device)
        config = self.model.config
        shape = (plan.num_blocks, config.num_kv_heads, config.num_layers, 2, _BLOCK_SIZE, config.head_dim)
        self._pool = torch.zeros(shape, dtype=dtype, device=device)
        self._sampler = GpuSampler(())
        start = time.perf_counter()
        recorder = CudaGraphRecorder() if device.type == "cuda" else EagerRecorder()
        self._runner = GpuRunner(self.model, self._sampler, self._pool, limits, recorder)
        _logger.info("%s: recorded steps in %.1f s", plan.name, time.perf_counter() - start)
        self._engine = self._make_engine()
        self._num_requests = 0
        # By id, with the tokens so far. Empty between measurements, unless the last one failed.
        self._answers: dict[str, tuple[EngineRequest, list[int]]] = {}

    def _make_engine(self) -> Engine:
        limits = self._plan.limits
        most_tokens = limits.max_num_batched_tokens
        scheduling = SchedulerConfig(_BLOCK_SIZE, limits.max_num_seqs, most_tokens, most_tokens, limits.max_model_len)
        pool = BlockPool(len(self._pool), retract=lambda block_ids: None)
        namespace = KVNamespace(bytes(32), str(self.model.dtype), "bench", _BLOCK_SIZE)
        return Engine(scheduling, self._runner, pool, namespace, eos_token_ids=(), publish=False, run_ahead=True)

    def prompt(self, length: int) -> tuple[int, ...]:
        ids: list[int] = torch.randint(self.model.config.vocab_size, (length,), generator=self._generator).tolist()
        return tuple(ids)

    def decode_step(self, batch: int, context: int, *, by_kernel: bool = False) -> Measured:
        self._renew_after_failure()
        for _ in range(batch):
            self._add(context, self._plan.sampling_for(batch, context))
        while self._engine.load().num_requests_decoding < batch:
            self._step()
        for _ in range(_WARMUP_STEPS):
            self._step()
        start = time.perf_counter()
        num_tokens = sum(self._step() for _ in range(self._plan.steps))
        seconds = time.perf_counter() - start
        parts = time_by_kernel(self._step, _PROFILED_STEPS) if by_kernel and self._device.type == "cuda" else {}
        self._end_all()
        assert num_tokens == batch * self._plan.steps, "a timed step did something else than decoding"
        return Measured(seconds / self._plan.steps, self._answers_error(), parts)

    def mixed_step(self, decodes: int, length: int) -> Measured:
        """Measures one step by itself, from its launch until its tokens are there: decodes of short sequences, and a
        prompt. The first time may compile."""
        prompt = self.prompt(length)

        def plan(logprobs: int | None) -> SchedulerOutput:
            row = SamplingRow(SamplingParams(temperature=0.0, seed=0, logprobs=logprobs), 0, length, 1)
            entries = [ScheduledSequence((7,), _BLOCK_SIZE - 1, (index,), (row,)) for index in range(decodes)]
            blocks = range(decodes, decodes + -(-length // _BLOCK_SIZE))
            return SchedulerOutput((*entries, ScheduledSequence(prompt, 0, blocks, (row,))), ())

        def run() -> None:
            self._runner.launch(plan(None)).collect()

        seconds = min(wall_seconds(run) for _ in range(self._plan.repeats))
        return Measured(seconds, self._distance_from_plain([plan(20)]))

    def first_token(self, length: int) -> Measured:
        """Measures one prompt several times, since the first time may compile, and returns the best."""
        runs = [self.batch(1, length, 1) for _ in range(self._plan.repeats)]
        return Measured(min(run.seconds for run in runs), max(run.error for run in runs))

    def batch(self, count: int, length: int, new: int) -> Measured:
        self._renew_after_failure()
        sampling = SamplingParams(temperature=0.0, seed=0, ignore_eos=True, max_tokens=new)
        for _ in range(count):
            self._add(length, sampling)
        start = time.perf_counter()
        num_tokens = 0
        while num_tokens < count * new:
            num_tokens += self._step()
        seconds = time.perf_counter() - start
        self._end_all()
        assert all(len(output) == new for _, output in self._answers.values()), "a timed step did something else"
        return Measured(seconds, self._answers_error())

    def launch(self) -> Measured:
        """Measures the seconds until a decode step is launched. Neither that nor the steps around it may wait for the
        GPU."""
        *prompts, decode, mixed = self._plans()
        with never_waiting(self._device):
            for plan in prompts:
                self._runner.launch(plan)
            start = time.perf_counter()
            self._runner.launch(decode)
            seconds = time.perf_counter() - start
            last = self._runner.launch(mixed)
        last.collect()
        return Measured(seconds, 0.0)

    def replay_error(self) -> float:
        """Compares a recorded step of decodes, and one with a prompt, with the same launched kernel by kernel and with
        attention in plain torch. Returns the deviation between the log-probabilities of the likeliest tokens, as a
        share of what is allowed."""
        *prompts, decode, mixed = self._plans()
        return self._distance_from_plain([decode, mixed], after=prompts)

    def _distance_from_plain(self, plans: Sequence[SchedulerOutput], after: Sequence[SchedulerOutput] = ()) -> float:
        """Compares the log-probabilities of the likeliest tokens that the steps `plans` find, once those of `after`
        have run, with what is found without recorded steps and with attention in plain torch."""
        found = self._top_logprobs(self._runner, plans, after)
        with self._plain_runner() as runner:
            expected = self._top_logprobs(runner, plans, after)
        return likeliest_error(found, expected, self.model.dtype)

    def _answers_error(self) -> float:
        """Checks the tokens of the requests since the last call, or of some if they are many, and forgets them. The
        requests must have ended."""
        answers, self._answers = [*self._answers.values()], {}
        every = max(1, -(-len(answers) // _MOST_CHECKED))
        found: list[TokenLogprobs] = []
        with self._plain_runner() as runner:
            for request, output in answers[::every]:
                prompt = request.prompt_token_ids
                table = range(-(-(len(prompt) + len(output)) // _BLOCK_SIZE))
                runner.launch(SchedulerOutput((ScheduledSequence(prompt[:-1], 0, table, ()),), ())).collect()
                spoken = ScheduledSequence((prompt[-1], *output[:-1]), len(prompt) - 1, table, (), (1, output))
                found += runner.launch(SchedulerOutput((spoken,), ())).collect().results[0].prompt_logprobs or ()
        return greedy_error(found, self.model.dtype)

    @contextmanager
    def _plain_runner(self) -> Iterator[GpuRunner]:
        """Yields a runner without recorded steps. Meanwhile attention is computed in plain torch."""
        kernels = self.model.layers[0].attention.backend
        self.model.attend_with(ReferenceBackend())
        try:
            yield GpuRunner(self.model, self._sampler, self._pool, self._plan.limits)
        finally:
            self.model.attend_with(kernels)

    def _top_logprobs(
        self, runner: GpuRunner, plans: Sequence[SchedulerOutput], after: Sequence[SchedulerOutput]
    ) -> list[TokenLogprobs]:
        for plan in after:
            runner.launch(plan).collect()
        outputs = [runner.launch(plan).collect() for plan in plans]
        rows = [result.sampled[0].logprobs for output in outputs for result in output.results]
        return [one for one in rows if one is not None]

    def _plans(self) -> list[SchedulerOutput]:
        """Returns a plan for each of a few prompts, the same each time, and then one decode step of them all. In the
        last one a new prompt takes the blocks of the last, while the others decode once more."""
        sampling = SamplingParams(temperature=0.0, seed=0, logprobs=20)
        length = 3 * _BLOCK_SIZE - 5
        tables = [[3 * index, 3 * index + 1, 3 * index + 2] for index in range(min(3, self._plan.limits.max_num_seqs))]
        plans = []
        for index, table in enumerate(tables):
            prompt = [(31 * at + 7 * index) % self.model.config.vocab_size for at in range(length)]
            plans.append(SchedulerOutput((ScheduledSequence(prompt, 0, table, ()),), ()))
        row = SamplingRow(sampling, 0, length + 1, 1)
        decodes = tuple(ScheduledSequence((7,), length, table, (row,)) for table in tables)
        later = SamplingRow(sampling, 0, length + 2, 2)
        mixed = [ScheduledSequence((8,), length + 1, table, (later,)) for table in tables[:-1]]
        new = range(9, 9 + _BLOCK_SIZE + 4)
        mixed.append(ScheduledSequence(new, 0, tables[-1], (SamplingRow(sampling, 0, len(new), 0),)))
        return [*plans, SchedulerOutput(decodes, ()), SchedulerOutput(tuple(mixed), ())]

    def _add(self, length: int, sampling: SamplingParams) -> None:
        self._num_requests += 1
        request = EngineRequest(str(self._num_requests), self.prompt(length), sampling)
        self._answers[request.request_id] = request, []
        self._engine.add(request)

    def _step(self) -> int:
        """Runs a step of the engine and returns the number of new tokens."""
        result, _ = self._engine.step()
        if result is None:
            return 0
        assert not result.failures, result.failures[0].message
        for item in result.outputs:
            self._answers[item.request_id][1].extend(item.output.token_ids)
        return sum(len(item.output.token_ids) for item in result.outputs)

    def _renew_after_failure(self) -> None:
        """Gives up an engine whose last measurement failed, with its requests and all that it holds of the pool."""
        if self._answers:
            self._answers = {}
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # its last steps may still write to the pool
            self._engine = self._make_engine()

    def _end_all(self) -> None:
        for name in self._answers:
            self._engine.abort(name)
        while self._engine.step()[1]:
            pass
        self._engine.check_idle()


def engine_tasks(plan: EnginePlan, dtype: torch.dtype, device: torch.device, rates: Rates, seed: int) -> Iterator[Task]:
    """Yields the measurements of one model, which all share it. If it cannot be made, there is only the task that says
    so."""
    made: list[EngineBench] = []
    yield Task(f"{plan.name} start: weights, recorded steps", partial(_start, made, plan, dtype, device, seed))
    if not made:
        return
    bench, work = made.pop(), _Work(plan.config, dtype)
    name = f"{plan.name} launch of a decode step, without waiting"
    yield Task(name, partial(_measured, name, bench.launch, 0.0))
    for batch, context in plan.decode:
        name = f"{plan.name} decode step {batch} x {context}"
        floor = rates.floor_seconds(work.decode_bytes(batch, context), work.flops(batch))
        yield Task(name, partial(_measured, name, partial(bench.decode_step, batch, context), floor))
    for decodes, length in plan.mixed:
        name = f"{plan.name} step of {decodes} decodes and {length} tokens of a prompt"
        floor = rates.floor_seconds(work.weight_bytes, work.flops(decodes + length))
        yield Task(name, partial(_measured, name, partial(bench.mixed_step, decodes, length), floor))
    for length in plan.prefill:
        name = f"{plan.name} first token of {length}"
        floor = rates.floor_seconds(work.weight_bytes, work.flops(length) + work.attention_flops(length))
        yield Task(name, partial(_measured, name, partial(bench.first_token, length), floor))
    count, prompt, new = plan.batch
    name = f"{plan.name} {count} x ({prompt} in, {new} out)"
    floor = count * rates.floor_seconds(0, work.flops(prompt) + work.attention_flops(prompt))
    floor += new * rates.floor_seconds(work.decode_bytes(count, prompt), work.flops(count))
    ours: list[Result] = []
    run = partial(_measured, name, partial(bench.batch, *plan.batch), floor)
    yield Task(name, partial(_kept, ours, run))
    prompts = [list(bench.prompt(prompt)) for _ in range(count)]
    del bench, run  # transformers needs the memory
    if ours and device.type == "cuda":
        peer = partial(generate_with_transformers, plan.config, prompts, new)
        yield Task(name, lambda: replace(ours[0], peers=attempt({"transformers continuous batching": peer})))


def kernel_tasks(plan: EnginePlan, dtype: torch.dtype, device: torch.device, rates: Rates, seed: int) -> Iterator[Task]:
    """Yields the decode steps of one model, with the time of each kernel."""
    made: list[EngineBench] = []
    yield Task(f"{plan.name} start: weights, recorded steps", partial(_start, made, plan, dtype, device, seed))
    if not made:
        return
    bench, work = made.pop(), _Work(plan.config, dtype)
    for batch, context in plan.decode:
        name = f"{plan.name} decode step {batch} x {context}, by kernel"
        floor = rates.floor_seconds(work.decode_bytes(batch, context), work.flops(batch))
        yield Task(name, partial(_measured, name, partial(bench.decode_step, batch, context, by_kernel=True), floor))


def _start(made: list[EngineBench], plan: EnginePlan, dtype: torch.dtype, device: torch.device, seed: int) -> Result:
    start = time.perf_counter()
    bench = EngineBench(plan, dtype, device, seed)
    seconds = time.perf_counter() - start
    error = bench.replay_error()
    made.append(bench)
    return Result(f"{plan.name} start: weights, recorded steps", error, seconds, 0.0)


def _measured(name: str, run: Callable[[], Measured], floor: float) -> Result:
    found = run()
    return Result(name, found.error, found.seconds, floor, parts=found.parts)


def _kept(kept: list[Result], run: Callable[[], Result]) -> Result:
    kept.append(run())
    return kept[0]


class _Work:
    """The bytes and floating-point operations that a model cannot avoid."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        head_dim = config.hidden_size // config.num_attention_heads
        heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim
        layer = config.hidden_size * (heads + 3 * config.intermediate_size)
        self._layer_weights = config.num_hidden_layers * layer
        self._head_weights = config.hidden_size * config.vocab_size
        self._kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize
        self._attention = 2 * config.num_hidden_layers * config.num_attention_heads * head_dim
        self.weight_bytes = (self._layer_weights + self._head_weights) * dtype.itemsize

    def decode_bytes(self, batch: int, context: int) -> float:
        return float(self.weight_bytes + batch * context * self._kv_bytes)

    def flops(self, num_tokens: int) -> float:
        """Returns the operations of the layers' matrix products. Where tokens are many, those of the head are few."""
        return float(2 * num_tokens * self._layer_weights)

    def attention_flops(self, num_tokens: int) -> float:
        """Returns the operations of causal attention within one prompt."""
        return float(self._attention) * num_tokens * num_tokens
