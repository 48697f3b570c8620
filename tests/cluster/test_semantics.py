"""What must not change if a request is split over nodes: sampling, parallel outputs, log-probabilities, prefix reuse,
leases."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from bench.random_model import EOS_TOKEN_ID
from kvrelay.core.errors import CancelledByPeerError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.generation.sampling_params import SamplingParams
from router.policies.choice import make_policy
from router.request import RequestTrace, RoutedRequest
from tests.cluster.cluster import cluster
from tests.cluster.prompts import VOCAB_SIZE, prompt_of
from tests.engine.reference import Reference
from tests.engine.tiny_models import make_tiny_model

SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 1234, "max_tokens": 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"), vocab_size=VOCAB_SIZE)


async def test_seeded_sampling_is_the_same_alone_in_a_batch_and_split(model: Path) -> None:
    prompts = [prompt_of(20 + 7 * i, i) for i in range(6)]
    async with cluster(model, prefill_nodes=0) as single:
        alone = [(await single.generate(prompt, **SAMPLING)).tokens[0] for prompt in prompts]
    async with cluster(
        model, prefill_nodes=2, decode_nodes=2, policy=make_policy("round_robin", local_prefill_max_tokens=0)
    ) as split:
        results = await asyncio.gather(*(split.generate(prompt, **SAMPLING) for prompt in prompts))
    assert [result.tokens[0] for result in results] == alone
    assert {result.how.decode_node for result in results} == {"decode-0", "decode-1"}
    assert len({tuple(tokens) for tokens in alone}) > 1


async def test_parallel_outputs_are_those_of_an_aggregated_node(model: Path) -> None:
    prompt = prompt_of(45)
    found = []
    for prefill_nodes in (0, 1):
        async with cluster(model, prefill_nodes=prefill_nodes) as running:
            found.append((await running.generate(prompt, n=4, **SAMPLING)).tokens)
    assert found[0] == found[1]
    assert sorted(found[0]) == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in found[0].values()}) == 4


async def test_penalties_bias_and_min_tokens_survive_the_split(model: Path) -> None:
    """The bias makes the end token the most likely one at once, so that only `min_tokens` keeps it away."""
    options: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": ((7, 2.5), (9, -100.0), (EOS_TOKEN_ID, 100.0)),
        "min_tokens": 20,
        "ignore_eos": False,
        "max_tokens": 24,
    }
    found = []
    for prefill_nodes in (0, 1):
        async with cluster(model, prefill_nodes=prefill_nodes) as running:
            found.append((await running.generate(prompt_of(60), **options)).tokens[0])
    assert found[0] == found[1]
    assert found[0].index(EOS_TOKEN_ID) == len(found[0]) - 1 == 20
    assert 9 not in found[0]


@pytest.mark.parametrize(
    "without", [{"repetition_penalty": 1.0}, {"presence_penalty": 0.0}, {"frequency_penalty": 0.0}]
)
async def test_each_penalty_changes_what_is_generated(model: Path, without: dict[str, Any]) -> None:
    penalties: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}
    async with cluster(model) as running:
        found = [
            (await running.generate(prompt_of(60), max_tokens=60, **{**penalties, **others})).tokens[0]
            for others in ({}, without)
        ]
    assert found[0] != found[1]


async def test_logprobs_are_the_models_on_both_sides_of_the_split(model: Path) -> None:
    reference = Reference(model)
    prompt = prompt_of(33)
    async with cluster(model) as running:
        served = await running.generate(prompt, max_tokens=6, logprobs=3, prompt_logprobs=2)
    tokens = served.tokens[0]
    expected = reference.logprobs([*prompt, *tokens])
    entries = [*served.prompt_logprobs, *served.logprobs[0]]
    assert [entry.token_id for entry in entries] == [*prompt[1:], *tokens]
    for position, entry in enumerate(entries):
        row = expected[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert [token_id for token_id, _ in entry.top] == row.topk(len(entry.top)).indices.tolist()
    assert [len(entry.top) for entry in entries] == [2] * 32 + [3] * 6


async def test_a_second_request_computes_only_its_suffix_on_whichever_node_it_lands(model: Path) -> None:
    """Round robin sends the second request to the other prefill node, which fetches the blocks from the first."""
    shared = prompt_of(160)
    reference = Reference(model)
    policy = make_policy("round_robin", local_prefill_max_tokens=0)
    async with cluster(model, prefill_nodes=2, policy=policy) as running:
        first = await running.generate([*shared, 1, 2, 3], max_tokens=4)
        await running.wait_indexed()
        second = await running.generate([*shared, 4, 5], max_tokens=4)
        await running.wait_indexed()
        third = await running.generate([*shared, 6], max_tokens=4)
    assert {first.how.prefill_node, second.how.prefill_node} == {"prefill-0", "prefill-1"}
    assert first.how.num_computed_tokens == 163
    assert second.how.num_computed_tokens == 2
    assert third.how.num_computed_tokens == 1
    for prompt, served in (([*shared, 4, 5], second), ([*shared, 6], third)):
        assert served.tokens[0] == reference.generate(prompt, 4)


async def test_the_next_turn_finds_what_the_decode_node_generated(model: Path) -> None:
    reference = Reference(model)
    prompt = prompt_of(20)
    async with cluster(model) as running:
        answer = await running.generate(prompt, max_tokens=50)
        await running.wait_indexed()
        turn = [*prompt, *answer.tokens[0], 3, 4, 5]
        served = await running.generate(turn, max_tokens=4)
    assert served.tokens[0] == reference.generate(turn, 4)
    assert served.how.num_computed_tokens == 73 - 64  # four full blocks, three of them partly or wholly generated


async def test_a_short_suffix_is_prefilled_where_it_is_decoded(model: Path) -> None:
    policy = make_policy("prefix_aware", local_prefill_max_tokens=16)
    async with cluster(model, policy=policy) as running:
        prompt = prompt_of(160)
        first = await running.generate(prompt, max_tokens=2)
        await running.wait_indexed()
        second = await running.generate([*prompt, 1, 2], max_tokens=2)
    assert first.how.prefill_node == "prefill-0"
    assert second.how.prefill_node is None
    assert second.how.num_computed_tokens == 2
    assert second.how.num_transferred_blocks == 0


async def test_another_decode_node_fetches_a_turn_and_computes_what_is_new(model: Path) -> None:
    """No prefill node has seen it, which would have to fetch it as well."""
    reference = Reference(model)
    policy = make_policy("prefix_aware", local_prefill_max_tokens=64)
    async with cluster(model, decode_nodes=2, policy=policy) as running:
        prompt = prompt_of(48)
        first = await running.generate(prompt, max_tokens=50)
        await running.wait_indexed()
        [busy] = [node for node in running.registry.decode if node.source.node_id == first.how.decode_node]
        busy.num_sequences += 10
        turn = [*prompt, *first.tokens[0], 3, 4, 5]
        second = await running.generate(turn, max_tokens=4)
        busy.num_sequences -= 10
    assert {first.how.prefill_node, second.how.prefill_node} == {None}
    assert second.how.decode_node != first.how.decode_node
    assert second.how.num_computed_tokens == 101 - 96  # six full blocks
    assert second.tokens[0] == reference.generate(turn, 4)


async def test_salts_keep_tenants_apart(model: Path) -> None:
    async with cluster(model) as running:
        prompt = prompt_of(64)
        first = await running.generate(prompt, max_tokens=2, cache_salt=b"a")
        await running.wait_indexed()
        other = await running.generate(prompt, max_tokens=2, cache_salt=b"b")
        await running.wait_indexed()
        again = await running.generate(prompt, max_tokens=2, cache_salt=b"a")
    assert first.how.num_computed_tokens == other.how.num_computed_tokens == 64
    assert again.how.num_computed_tokens < 64
    assert first.tokens == other.tokens == again.tokens


async def test_blocks_move_and_are_counted(model: Path) -> None:
    async with cluster(model) as running:
        served = await running.generate(prompt_of(40), max_tokens=3)
    assert served.how.num_prompt_blocks == 3
    assert served.how.num_transferred_blocks == 3, "two full blocks and the partial tail"
    assert served.how.num_computed_tokens == 40


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_requests_of_one_or_two_tokens_give_transformers_tokens(model: Path, max_tokens: int) -> None:
    reference = Reference(model)
    async with cluster(model) as running:
        served = await running.generate(prompt_of(30), max_tokens=max_tokens)
        assert served.tokens[0] == reference.generate(prompt_of(30), max_tokens)


async def test_a_client_that_goes_away_leaves_nothing(model: Path) -> None:
    """The client leaves at the first token, in the middle, or by an abort. `cluster` checks that pools are whole and
    leases gone."""
    async with cluster(model) as running:
        for stop_after in (1, 5):
            request = RoutedRequest(
                f"gone{stop_after}",
                tuple(prompt_of(300)),
                SamplingParams(max_tokens=500, temperature=0.0, seed=0),
                running.kv_namespace,
                timeout=120.0,
            )
            seen = 0
            async with aclosing(running.relay.run(request)) as events:
                async for event in events:
                    seen += len(event.token_ids) if isinstance(event, TokenOutput) else 0
                    if seen >= stop_after:
                        break
            await running.wait_idle()
        aborted = RoutedRequest(
            "aborted",
            tuple(prompt_of(50)),
            SamplingParams(max_tokens=2000, temperature=0.0, seed=0),
            running.kv_namespace,
            timeout=120.0,
        )
        with pytest.raises(CancelledByPeerError):
            async for _ in running.relay.run(aborted):
                running.relay.abort("aborted")


async def test_finishing_every_output_early_ends_the_request_with_a_trace(model: Path) -> None:
    """As stop strings do, one of two outputs is finished early, then the other."""
    sampling = SamplingParams(n=2, max_tokens=900, temperature=0.9, seed=3)
    counts = {0: 0, 1: 0}
    traces = []
    async with cluster(model) as running:
        request = RoutedRequest("stop", tuple(prompt_of(50)), sampling, running.kv_namespace, timeout=120.0)
        async for event in running.relay.run(request):
            if isinstance(event, TokenOutput):
                counts[event.index] += len(event.token_ids)
                if counts[event.index] == (3 if event.index == 0 else 20):
                    running.relay.finish("stop", event.index)
            elif isinstance(event, RequestTrace):
                traces.append(event)
    assert len(traces) == 1
    assert 3 <= counts[0] < 900, "what was under way may still come"
    assert 20 <= counts[1] < 900


async def test_a_lease_that_nobody_renews_expires(model: Path) -> None:
    """The router is not told: the node's own sweeper frees the blocks."""
    async with cluster(model, lease_ttl=0.2) as running:
        for client in running.relay._placer._prefill_clients.values():
            client.hold = client.release = lambda wire_id: None  # type: ignore[method-assign]
        await running.generate(prompt_of(100), max_tokens=3)
        await running.wait_idle()
