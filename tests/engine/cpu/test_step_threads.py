"""How many threads a step runs on: as many as the table says at every layer, and results do not depend on it."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from paged_kernels._native import start_together
from paged_kernels.base import AttentionMetadata
from paged_kernels.cpu import packed
from paged_kernels.cpu.threads import num_threads, threads_kept, use_threads
from paged_kernels.registry import select_backend
from torch import Tensor

from kvrelay.core.process.core_table import CoreShare
from kvrelay.engine.cpu.step_threads import StepThreads
from kvrelay.engine.engine_thread import EngineThread
from kvrelay.engine.loading.loader import load_model
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.request import KVRole
from tests.engine.harness import Harness, prompt_of, request
from tests.engine.timed_runner import TimedRunner
from tests.engine.tiny_models import make_tiny_model
from tests.kernel_helpers import helper_seconds
from tests.manual_clock import ManualClock

BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    with threads_kept():
        yield


@pytest.mark.parametrize("torch_multiplies", [True, False])
def test_cores_are_taken_and_given_back_between_layers(
    shares: tuple[CoreShare, CoreShare], torch_multiplies: bool
) -> None:
    ours, other = shares
    threads = StepThreads(ours, torch_multiplies=torch_multiplies)
    threads.begin_step()
    found = [threads.num_threads]
    told = [num_threads()]
    for change in (other.claim, other.claim, other.release):
        change()
        threads.before_layer()
        found.append(threads.num_threads)
        told.append(num_threads())
    assert found == [2, 1, 1, 2]
    assert told == (found if torch_multiplies else [2, 2, 2, 2]), "our kernels look at the table themselves"
    threads.rest()
    assert threads.num_borrowing_steps == 1
    other.claim()
    assert other.available() == 2
    threads.begin_step()
    assert threads.num_threads == 1
    threads.rest()
    assert threads.num_borrowing_steps == 1


def test_a_product_takes_and_leaves_threads_as_the_table_says(shares: tuple[CoreShare, CoreShare]) -> None:
    ours, other = shares
    threads, weight = StepThreads(ours), packed.pack(torch.randn(6000, 256).bfloat16())
    x = torch.randn(64, 256).bfloat16()
    with ExitStack() as stack:
        start_together(True)
        stack.callback(start_together, False)
        expected = packed.linear(x, weight)
        seconds = []
        for change in (other.claim, other.release):
            change()
            threads.begin_step()
            before = helper_seconds()
            assert all(torch.equal(packed.linear(x, weight), expected) for _ in range(20))
            seconds.append(helper_seconds() - before)
            threads.rest()
    assert seconds[0] < 0.1 * seconds[1]


def test_torch_gets_one_thread_unless_products_are_its(shares: tuple[CoreShare, CoreShare]) -> None:
    for torch_multiplies, expected in ((False, 1), (True, 2)):
        StepThreads(shares[0], torch_multiplies=torch_multiplies).begin_step()
        assert (num_threads(), torch.get_num_threads()) == (2, expected)


def test_a_node_has_the_threads_that_its_user_gave_it_though_there_are_fewer_cores(
    shares: tuple[CoreShare, CoreShare],
) -> None:
    threads = StepThreads(CoreShare(3, shares[0].table, 0))
    threads.begin_step()
    assert threads.num_threads == num_threads() == 3
    threads.rest()


def test_numbers_are_put_back_when_there_is_nothing_to_do(shares: tuple[CoreShare, CoreShare]) -> None:
    torch.set_num_threads(3)
    threads = StepThreads(shares[0])
    for _ in range(2):
        for _ in range(2):
            threads.begin_step()
            assert (num_threads(), torch.get_num_threads()) == (2, 1)
        for _ in range(2):
            threads.rest()
            assert num_threads() == torch.get_num_threads() == 3


def test_without_a_share_numbers_of_threads_never_change() -> None:
    torch.set_num_threads(2)
    threads = StepThreads()
    threads.begin_step()
    threads.before_layer()
    threads.rest()
    assert num_threads() == torch.get_num_threads() == 2
    assert threads.num_borrowing_steps == 0


def test_the_callback_of_a_step_runs_once_when_its_layers_begin() -> None:
    threads = StepThreads()
    started: list[str] = []
    threads.begin_step(lambda: started.append("first"))
    assert started == []
    threads.before_layer()
    threads.before_layer()
    threads.begin_step()
    threads.before_layer()
    assert started == ["first"]


def test_an_engine_claims_its_cores_while_it_has_work(shares: tuple[CoreShare, CoreShare]) -> None:
    ours, other = shares
    other.claim()
    harness = Harness(threads=StepThreads(ours))
    harness.step()
    assert other.available() == 2
    harness.engine.add(request("a", prompt_of(5), 3))
    while harness.step():
        assert other.available() == 1
    assert other.available() == 2
    other.release()
    harness.engine.add(request("b", prompt_of(7), 3))
    while harness.step():
        pass
    load = harness.engine.load()
    assert 0 < load.num_borrowing_steps < load.num_steps
    harness.engine.check_idle()


@pytest.mark.parametrize(
    ("prompt_token", "expected"),
    [
        (0.020, [True, True, False, False]),  # then three wait for a place among the running ones
        (0.002, [False, False, False, False]),  # three prompts do not take long
    ],
)
def test_an_engine_says_whether_prompts_wait_long_for_its_steps_alone(
    shares: tuple[CoreShare, CoreShare], prompt_token: float, expected: list[bool]
) -> None:
    ours, other = shares
    clock = ManualClock()
    harness = Harness(
        threads=StepThreads(ours),
        clock=clock,
        max_num_batched_tokens=64,
        max_num_seqs=3,
        wrap=lambda runner: TimedRunner(runner, clock, decode=0.001, prompt_token=prompt_token),
    )
    harness.engine.add(request("first", prompt_of(60), 1))  # shows what prompts cost
    harness.run()
    said = []
    for name in "abcdef":
        harness.engine.add(request(name, prompt_of(60, seed=ord(name)), 50))
    for _ in range(4):
        harness.step()
        said.append(other.prompts_wait_elsewhere())
    assert said == expected
    for name in "abcdef":
        harness.engine.abort(name)
    harness.step()
    harness.engine.check_idle()


def test_prompts_do_not_wait_for_steps_behind_one_that_is_to_reserve_its_blocks(
    shares: tuple[CoreShare, CoreShare],
) -> None:
    """They begin only once it has these, which it gets as soon as an output has ended."""
    ours, _ = shares
    harness = Harness(num_blocks=8, threads=StepThreads(ours), clock=ManualClock())
    harness.engine.add(request("running", prompt_of(8), 40))
    harness.step()
    harness.engine.add(request("arriving", prompt_of(60, 1), 2, role=KVRole.CONSUME))
    for number in range(3):
        harness.engine.add(request(str(number), prompt_of(8, 2 + number), 2))
    harness.step()
    assert harness.engine._scheduler.reserving.peek().lacks_room and not harness.engine._scheduler.prompts_wait(8)
    for name in ("running", "arriving", "0", "1", "2"):
        harness.engine.abort(name)
    harness.step()
    harness.engine.check_idle()


async def test_an_engine_that_is_stopped_at_work_gives_its_cores_back(shares: tuple[CoreShare, CoreShare]) -> None:
    ours, other = shares
    other.claim()
    harness, started = Harness(threads=StepThreads(ours)), asyncio.Event()
    thread = EngineThread(
        harness.engine,
        asyncio.get_running_loop(),
        on_result=lambda result: started.set(),
        on_crash=lambda error: started.set(),
    )
    thread.start()
    async with asyncio.timeout(10.0):
        await thread.call(lambda engine: engine.add(request("a", prompt_of(5), 500)))
        await started.wait()
        await thread.stop(10.0)
    assert other.available() == 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderForCausalLM:
    """Loads a model all of whose products are computed by our own kernels."""
    directory = make_tiny_model("llama", tmp_path_factory.mktemp("llama"), vocab_size=320)
    attention = select_backend("native")
    loaded = load_model(str(directory), dtype="bfloat16", attention=attention, max_model_len=None, quantization="int8")
    return loaded.model


def logits_of(model: DecoderForCausalLM, num_tokens: int, count: int) -> Tensor:
    """Returns the logits of all positions of one prompt, computed on `count` threads."""
    config = model.config
    pool = torch.zeros(8, config.num_kv_heads, config.num_layers, 2, BLOCK_SIZE, config.head_dim, dtype=torch.bfloat16)
    positions = torch.arange(num_tokens)
    metadata = AttentionMetadata(
        slot_mapping=positions,
        block_tables=torch.arange(8, dtype=torch.int32)[None],
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    use_threads(count)
    return model.compute_logits(model.forward(positions * 7 % 300, positions, pool, metadata))


@pytest.mark.parametrize("num_tokens", [1, 3, 120])
def test_the_number_of_threads_changes_no_bit(model: DecoderForCausalLM, num_tokens: int) -> None:
    with torch.inference_mode(), ExitStack() as stack:
        start_together(True)  # else helpers might find nothing left to do
        stack.callback(start_together, False)
        alone = logits_of(model, num_tokens, 1)
        assert torch.equal(logits_of(model, num_tokens, 2), alone)
        assert torch.equal(logits_of(model, num_tokens, 3), alone)
