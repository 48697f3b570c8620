"""From settings to results: the client, the prompts and the runs of one command. Other programs call it, too."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvrelay.bench.base import Client, Generation
from kvrelay.bench.plan import plan_warmup, plans_of
from kvrelay.bench.prompts import PromptBuilder, Vocabulary
from kvrelay.bench.result import RunResult
from kvrelay.bench.run import Runner
from kvrelay.bench.settings import GRPC_SCHEME, BenchSettings
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.process.extras import require_extra


async def measure(settings: BenchSettings) -> tuple[str, list[RunResult]]:
    """Returns the model's name and a result per plan, fewer when Ctrl-C or SIGTERM interrupts it, none when it
    interrupts the warm-up. Raises KVRelayError when nothing can be measured; ends the process when the server needs a
    package that is not installed."""
    plans = plans_of(settings)
    clock = MonotonicClock()
    async with _client(settings, clock) as client:
        model = await client.resolve_model(settings.model)
        builder = PromptBuilder(_vocabulary(settings, model), settings.effective_prompt_format, seed=settings.seed)
        progress = settings.progress == "on" or (settings.progress == "auto" and sys.stderr.isatty())
        with _set_by_signals() as interrupted:
            runner = Runner(client, builder, clock, settings.slos, interrupted, progress)
            await runner.warm_up(plan_warmup(settings, plans[0]))
            results: list[RunResult] = []
            for plan in plans:
                if interrupted.is_set():
                    break
                results.append(await runner.measure(plan))
    return model, results


@contextmanager
def _set_by_signals() -> Iterator[asyncio.Event]:
    """Yields an event that Ctrl-C sets, and SIGTERM, as `timeout` and batch systems send it. Afterwards both do again
    what they did before, such as ending another program's servers."""
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        loop.add_signal_handler(number, interrupted.set)
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


@asynccontextmanager
async def _client(settings: BenchSettings, clock: Clock) -> AsyncIterator[Client]:
    generation = Generation(
        settings.temperature, settings.ignore_eos, settings.timeout, top_k=settings.top_k, top_p=settings.top_p
    )
    client: Client
    if settings.is_grpc:
        from kvrelay.bench.grpc_client import GrpcClient

        client = GrpcClient(settings.url.removeprefix(GRPC_SCHEME).rstrip("/"), generation, clock)
    else:
        require_extra("bench", ["aiohttp"], purpose="kvrelay bench over HTTP")
        from kvrelay.bench.openai_client import OpenAIClient

        key = settings.api_key.get_secret_value()
        client = OpenAIClient(
            settings.url, settings.endpoint, generation, clock,
            api_key=key, keep_alive=settings.keep_alive, extra_body=json.loads(settings.extra_body),
        )  # fmt: skip
    try:
        yield client
    finally:
        await client.close()


def _vocabulary(settings: BenchSettings, model: str) -> Vocabulary | None:
    if not settings.draws_prompts:
        return None
    if settings.vocab_size is not None:
        return Vocabulary.of_size(settings.vocab_size)
    return Vocabulary.of_tokenizer(settings.tokenizer or model)
