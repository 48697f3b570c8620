"""The runs of one command: warm-up, load, progress, and a result even when a signal ends the run."""

import asyncio
import gc
import os
import shutil
import sys
from dataclasses import dataclass

from kvrelay.bench.base import Client
from kvrelay.bench.load import Load
from kvrelay.bench.offered import Offered
from kvrelay.bench.plan import Plan
from kvrelay.bench.prompts import PromptBuilder
from kvrelay.bench.result import RunResult
from kvrelay.bench.slo import Slos
from kvrelay.bench.summary import count_failures, summaries_by_kind, summarise
from kvrelay.core.clock import Clock
from kvrelay.core.errors import UnavailableError
from kvrelay.core.tasks import end_tasks

_PROGRESS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Runner:
    """The parts that the runs of one command share. Setting `interrupted` ends the present run and all later ones."""

    client: Client
    builder: PromptBuilder
    clock: Clock
    slos: Slos | None
    interrupted: asyncio.Event
    show_progress: bool

    async def warm_up(self, plan: Plan) -> None:
        """Sends the requests of the warm-up. Raises UnavailableError when one fails: the measured ones would, too."""
        load = await self._run_load(plan)
        failures = count_failures(load.records)
        if failures:
            raise UnavailableError(f"a warm-up request failed: {failures[0].kind}: {failures[0].first_message}")

    async def measure(self, plan: Plan) -> RunResult:
        """Runs the load and returns what it gave; what a signal cut off is a result too."""
        gc.collect()
        gc.freeze()  # a collection now looks only at what the run makes: the server shares our cores
        try:
            load = await self._run_load(plan)
            cpu, elapsed = load.cpu_seconds, load.elapsed
        finally:
            gc.unfreeze()
        window = None if plan.window is None else min(plan.window, elapsed)
        records = sorted(load.records, key=lambda record: record.index)
        was_cut = self.interrupted.is_set()
        has_streams = plan.num_requests is None  # which ask again and again
        offered = None if has_streams else Offered.of(plan.sessions, records, asked_rate=plan.request_rate)
        return RunResult(
            label=plan.label,
            summary=summarise(records, slos=self.slos, window=window),
            by_kind=summaries_by_kind(records, slos=self.slos, window=window),
            records=tuple(records),
            client_cpu_seconds=cpu,
            client_cpu_share=cpu / max(elapsed, 1e-9),
            was_cut=was_cut,
            num_unsent=0 if was_cut or plan.num_requests is None else plan.num_requests - len(records),
            max_concurrency=plan.max_concurrency,
            num_at_once=None if any(session.at for session in plan.sessions) else len(plan.sessions),
            offered=offered,
            longest_stall=load.longest_stall,
        )

    async def _run_load(self, plan: Plan) -> Load:
        """Returns when the load is done or interrupted."""
        load = Load(self.client, self.builder, self.clock, max_concurrency=plan.max_concurrency)
        running = asyncio.create_task(load.run(plan.sessions))
        stopped = asyncio.create_task(self.interrupted.wait())
        progress = asyncio.create_task(self._show(load, plan))
        try:
            await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(running, stopped, progress)
        if not running.cancelled():
            running.result()
        return load

    async def _show(self, load: Load, plan: Plan) -> None:
        if not self.show_progress:
            return
        try:
            while True:
                await asyncio.sleep(_PROGRESS_SECONDS)
                sys.stderr.write(f"\r{_progress_line(load, plan)[: _columns() - 1]}\x1b[K")
                sys.stderr.flush()
        finally:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _columns() -> int:
    """Returns the width of the terminal that shows progress: a longer line would leave one behind each time."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # it is none
        return shutil.get_terminal_size().columns


def _progress_line(load: Load, plan: Plan) -> str:
    of = "" if plan.num_requests is None else f"/{plan.num_requests}"
    tokens = load.num_output_tokens + sum(answer.num_tokens for answer in list(load.running.values()))
    rate = tokens / max(load.elapsed, 1e-9)
    name = f"{plan.label}: " if plan.label else ""
    return (
        f"{name}{len(load.records)}{of} requests done, {len(load.running)} running, {load.num_failed} failed, "
        f"{load.elapsed:.0f} s, {rate:.1f} output tokens/s"
    )
