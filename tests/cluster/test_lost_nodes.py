"""Nodes die at any moment of a request, and the client gets exactly the tokens of an undisturbed run."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.errors import UnavailableError
from tests.cluster.cluster import Served, cluster
from tests.cluster.prompts import VOCAB_SIZE, prompt_of
from tests.cluster.undisturbed import PARALLEL, SAMPLED, check_same, killed_after, nodes, serve_undisturbed, served_with
from tests.engine.tiny_models import make_tiny_model

PROMPT = prompt_of(44)  # with 4 output tokens it fills three blocks
GREEDY: dict[str, Any] = {"max_tokens": 60}
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED, "parallel": PARALLEL}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> dict[str, Served]:
    return asyncio.run(serve_undisturbed(model, PROMPT, SAMPLINGS))


# 4 tokens fill a block of which the prompt has a part, 20 one that is generated.
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 11, 20])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
async def test_a_decode_node_that_dies_changes_no_token(
    model: Path, undisturbed: dict[str, Served], sampling: str, num_tokens: int
) -> None:
    async with nodes(model, 2, 2) as running:
        served = await killed_after(running, PROMPT, num_tokens, **SAMPLINGS[sampling])
    check_same(served, undisturbed[sampling])
    assert (served.how.decode_node, served.how.num_migrations) == ("decode-1", 1)
    assert served.how.prefill_node == "prefill-0"


@pytest.mark.parametrize("num_tokens", [1, 10, 50])
async def test_parallel_outputs_are_placed_again_one_by_one(
    model: Path, undisturbed: dict[str, Served], num_tokens: int
) -> None:
    async with nodes(model, 2, 2) as running:
        served = await killed_after(running, PROMPT, num_tokens, **PARALLEL)
    check_same(served, undisturbed["parallel"])
    assert len(served.tokens) == 3 and served.how.num_migrations == 3


async def test_a_decode_node_that_dies_before_any_token_changes_no_token(
    model: Path, undisturbed: dict[str, Served]
) -> None:
    """The prefill node is held up meanwhile."""
    async with nodes(model, 2, 2) as running:
        gate = running.hold("prefill-0")
        serving = asyncio.create_task(running.generate(PROMPT, **SAMPLED))
        await running.wait_admitted("decode-0")
        await running.kill("decode-0")
        gate.set()
        check_same(await serving, undisturbed["sampled"])


async def test_eight_streams_survive_their_decode_node(model: Path) -> None:
    prompts = [prompt_of(30 + 9 * number, number) for number in range(8)]
    async with cluster(model, prefill_nodes=0) as single:
        expected = [await single.generate(prompt, max_tokens=50) for prompt in prompts]
    begun = set[int]()
    killing: list[asyncio.Task[None]] = []
    async with nodes(model, 2, 2) as running:

        def watch(number: int) -> Callable[[int], None]:
            def on_tokens(count: int) -> None:
                begun.update([number] if count >= 5 else [])
                if len(begun) >= 4 and not killing:
                    killing.append(asyncio.create_task(running.kill("decode-0")))

            return on_tokens

        served = await asyncio.gather(
            *(running.generate(prompt, max_tokens=50, on_tokens=watch(i)) for i, prompt in enumerate(prompts))
        )
        await killing[0]
        await running.wait_idle()
        for found, wanted in zip(served, expected, strict=True):
            check_same(found, wanted)
        assert sum(found.how.num_migrations for found in served) >= 1


async def test_a_replay_computes_only_what_no_node_holds(model: Path) -> None:
    """The prefill node holds the prompt's three blocks, so little more than the output is computed again."""
    async with nodes(model, 1, 2) as running:
        served = await killed_after(running, PROMPT, 5, **GREEDY)
        assert served.how.num_migrations == 1
        assert 0 < running.metric("recomputed_tokens_total", cause="migration") < len(PROMPT)


async def test_a_prefill_node_that_dies_before_its_first_token_is_replaced(
    model: Path, undisturbed: dict[str, Served]
) -> None:
    async with nodes(model, 2, 2) as running:
        gate = running.hold("prefill-0")
        serving = asyncio.create_task(running.generate(PROMPT, **SAMPLED))
        await running.wait_admitted("decode-0")
        await running.kill("prefill-0")
        gate.set()
        served = await serving
    check_same(served, undisturbed["sampled"])
    assert (served.how.prefill_node, served.how.num_migrations) == ("prefill-1", 1)


async def test_a_prefill_node_that_dies_after_its_first_token_is_not_missed(
    model: Path, undisturbed: dict[str, Served]
) -> None:
    async with nodes(model, 2, 2) as running:
        served = await served_with(running, PROMPT, lambda: running.kill("prefill-0"), **SAMPLED)
    check_same(served, undisturbed["sampled"])
    assert (served.how.prefill_node, served.how.num_migrations) == ("prefill-0", 0)


async def test_when_every_prefill_node_dies_the_decode_node_prefills(
    model: Path, undisturbed: dict[str, Served]
) -> None:
    async with nodes(model, 2, 2) as running:
        gates = [running.hold(f"prefill-{index}") for index in range(2)]
        serving = asyncio.create_task(running.generate(PROMPT, **GREEDY))
        await running.wait_admitted("decode-0")
        for index, gate in enumerate(gates):
            await running.kill(f"prefill-{index}")
            gate.set()
        served = await serving
    check_same(served, undisturbed["greedy"])
    assert served.how.prefill_node is None


async def test_without_a_decode_node_there_is_one_error_and_nothing_left(model: Path) -> None:
    """`cluster` checks that the prefill nodes' leases are gone and their pools whole."""
    async with nodes(model, 2, 2) as running:

        async def kill() -> None:
            gates = [running.hold(f"decode-{index}") for index in range(2)]
            for index, gate in enumerate(gates):
                await running.kill(f"decode-{index}")
                gate.set()

        with pytest.raises(UnavailableError):
            await served_with(running, PROMPT, kill, num_tokens=3, max_tokens=500)
        await running.wait_idle()
        assert [node.event_log.load.num_leases for node in running.nodes] == [0, 0]
