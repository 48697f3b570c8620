"""An engine with a runner whose KV is the tokens, and what a connector and a receiver do for it."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

from kvrelay.core.clock import Clock
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.engine.cpu.step_threads import StepThreads
from kvrelay.engine.engine import Engine
from kvrelay.engine.request import EngineRequest, KVRole
from kvrelay.engine.runner import Runner
from kvrelay.engine.scheduler import SchedulerConfig
from kvrelay.engine.step_result import Reservation, StepResult
from tests.engine.fake_runner import FakeRunner
from tests.engine.late_runner import LateRunner, WatchedPool

BLOCK_SIZE = 8
NAMESPACE = KVNamespace(b"fake", "float32", "fake", BLOCK_SIZE)


class Harness:
    """An engine, its fake runner, and everything it has reported. With `run_ahead`, `late` is the runner between the
    two. `wrap` may put another runner in front. Without `max_num_mixed_tokens`, steps that also decode are as long as
    others."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 64,
        max_num_mixed_tokens: int | None = None,
        publish: bool = False,
        publish_hits: bool = False,
        policy: str = "fcfs",
        eos: Sequence[int] = (),
        run_ahead: bool = False,
        threads: StepThreads | None = None,
        wrap: Callable[[Runner], Runner] = lambda runner: runner,
        clock: Clock | None = None,
    ) -> None:
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE)
        self.late = LateRunner(self.runner)
        self.retracted: list[int] = []
        config = SchedulerConfig(
            block_size=BLOCK_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_mixed_tokens=max_num_batched_tokens if max_num_mixed_tokens is None else max_num_mixed_tokens,
            max_model_len=num_blocks * BLOCK_SIZE,
            policy="priority" if policy == "priority" else "fcfs",
        )
        self.engine = Engine(
            config,
            wrap(self.late if run_ahead else self.runner),
            WatchedPool(num_blocks, self.late, retract=self.retracted.extend),
            NAMESPACE,
            eos_token_ids=eos,
            publish=publish,
            publish_hits=publish_hits,
            run_ahead=run_ahead,
            threads=threads,
            clock=clock,
        )
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[str, int], FinishReason] = {}
        self.results: list[StepResult] = []
        self.finish_order: list[str] = []

    def count_step(self) -> int:
        """Steps, and returns how many tokens that computed."""
        before = self.runner.num_computed_tokens
        self.step()
        return self.runner.num_computed_tokens - before

    def step(self) -> bool:
        result, busy = self.engine.step()
        if result is not None:
            self.results.append(result)
            for item in result.outputs:
                key = (item.request_id, item.output.index)
                self.tokens[key].extend(item.output.token_ids)
                if item.output.finish_reason is not None:
                    self.finished[key] = item.output.finish_reason
                    self.finish_order.append(item.request_id)
            if result.named:
                self.engine.unpin([block.block_id for block in result.named])
        return busy

    def run(self) -> None:
        while self.step():
            pass

    def cached_tokens(self, request_id: str) -> int:
        return next(p.num_cached_tokens for r in self.results for p in r.prompts if p.request_id == request_id)

    def reservation(self, request_id: str) -> Reservation:
        return next(a for r in self.results for a in r.reservations if a.request_id == request_id)


def request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    role: KVRole = KVRole.LOCAL,
    priority: int = 0,
    n: int = 1,
) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, n=n, temperature=0.0, seed=0)
    receive = role is KVRole.CONSUME
    return EngineRequest(request_id, tuple(prompt), sampling, priority=priority, role=role, receive=receive)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(1000) for i in range(length)]


def move(source: Harness, target: Harness, reservation: Reservation, *, count: int | None = None) -> None:
    """Copies blocks by name, delivers and unpins them, as a connector and a receiver do."""
    for block in reservation.missing[:count]:
        holder = source.engine.pool.find(block.block_hash)
        assert holder is not None
        target.runner.pool[block.block_id] = source.runner.pool[holder].copy()
    target.engine.deliver(reservation.request_id, len(reservation.missing) if count is None else count)
    target.engine.unpin([block.block_id for block in reservation.missing])


def first_tokens(harness: Harness, request_id: str) -> list[TokenOutput]:
    return [item.output for r in harness.results for item in r.outputs if item.request_id == request_id]


def produce(harness: Harness, request_id: str, prompt: list[int], n: int = 1) -> None:
    harness.engine.add(request(request_id, prompt, 8, role=KVRole.PRODUCE, n=n))
    harness.run()
