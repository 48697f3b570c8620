"""Clusters in virtual time: what their nodes take, hold and make, and the command that compares policies on them."""

from dataclasses import replace
from random import Random

import pytest

from bench.placement.__main__ import main
from bench.placement.cluster import VirtualCluster
from bench.placement.nodes import NodeCosts, NodeLimits, Request
from bench.placement.pool import Pool
from bench.topology import Topology
from kvrelay.bench.base import RequestSpec, Segment
from kvrelay.bench.workloads import Session, arriving
from kvrelay.core.kv.block_hash import BlockHash
from router.nodes.kv_index import KVIndex
from router.policies.by_load import LeastLoaded, RoundRobin
from router.policies.placement import Policy
from router.policies.prefix_aware import PrefixAware

COSTS = NodeCosts(step=0.010, sequence=0.001, prompt_token=0.0001, moved_token=0.00001)
LIMITS = NodeLimits(
    block_size=16, num_blocks=1000, max_num_seqs=8, max_num_batched_tokens=512, tokens_beside_decodes=64
)
ROOMY = replace(LIMITS, num_blocks=10_000, max_num_seqs=64)
ONE_EACH = Topology(1, 1)


def prompt(name: str, num_tokens: int, num_outputs: int = 5, *, prefix: int = 0) -> RequestSpec:
    """Returns a request; the first `prefix` tokens are those of all others."""
    return RequestSpec((Segment("prefix", prefix), Segment(name, num_tokens - prefix)), num_outputs)


def served(
    sessions: list[Session], topology: Topology, policy: Policy | None = None, limits: NodeLimits = LIMITS
) -> list[Request]:
    return VirtualCluster(policy or PrefixAware(), topology, COSTS, limits).run(sessions)


def test_a_prompt_and_its_tokens_take_what_their_steps_cost() -> None:
    """1,000 tokens are two steps at the prefill node, and each token after the first one step that decodes."""
    [request] = served([Session(3.0, [prompt("a", 1000)])], ONE_EACH)
    assert request.first_token == pytest.approx(3.0 + 2 * 0.010 + 1000 * 0.0001)
    assert request.last_token - request.first_token == pytest.approx(4 * 0.011)


def test_a_decode_node_computes_prompts_beside_its_sequences_in_smaller_parts() -> None:
    """The first prompt takes a step of 512 tokens and one of 88. The second one, which comes meanwhile, takes steps of
    64 and 36 tokens beside a decode."""
    sessions = arriving([prompt("a", 600), prompt("b", 100)], [0.0, 0.079])
    first, second = sorted(served(sessions, Topology(0, 1)), key=lambda request: request.arrived)
    assert first.first_token == pytest.approx(0.020 + 0.060)
    assert second.first_token == pytest.approx(0.080 + 2 * 0.011 + 100 * 0.0001)


def test_a_turn_finds_the_kv_of_the_turns_before() -> None:
    turns = Session(0.0, [prompt("a", 100, 12), prompt("b", 50, 12)], is_conversation=True, think_time=1.0)
    first, second = served([turns], ONE_EACH)
    assert (first.num_held_tokens, first.num_computed_tokens) == (0, 100)
    # 112 tokens came before, which are seven blocks. The decode node has them, and 50 tokens are missing.
    assert (second.num_held_tokens, second.num_computed_tokens, second.num_prompt_tokens) == (112, 50, 162)
    assert second.arrived == pytest.approx(first.last_token + 1.0)


def test_prompts_of_other_sessions_are_others() -> None:
    sessions = arriving([prompt("a", 400, prefix=320), prompt("b", 400, prefix=320), prompt("c", 400)], [0.0, 1.0, 2.0])
    assert [request.num_computed_tokens for request in served(sessions, ONE_EACH)] == [400, 80, 400]


def test_of_a_burst_with_common_beginnings_each_is_computed_at_one_node() -> None:
    """Four nodes that prefill by themselves get two of eight beginnings each, and prompts follow the first of theirs;
    with least_loaded, most nodes compute most beginnings."""
    names = [f"{number}" for number in range(8)] * 5
    Random(1).shuffle(names)
    specs = [
        RequestSpec((Segment(f"beginning/{name}", 4096), Segment(f"own/{number}", 4)), 5)
        for number, name in enumerate([*sorted(set(names)), *names])
    ]
    num_computed = {
        type(policy): sum(
            request.num_computed_tokens - 4
            for request in served(arriving(specs, [0.0] * len(specs)), Topology(0, 4), policy, ROOMY)
        )
        for policy in (PrefixAware(), LeastLoaded())
    }
    assert num_computed[PrefixAware] < 9 * 4096  # one that follows in the same step lacks what that computes
    assert num_computed[LeastLoaded] >= 20 * 4096


@pytest.mark.parametrize("policy", [PrefixAware(), LeastLoaded(), RoundRobin()])
@pytest.mark.parametrize("topology", [Topology(0, 3), Topology(2, 3)])
def test_every_request_gets_all_its_tokens_though_pools_and_places_are_few(policy: Policy, topology: Topology) -> None:
    draw = Random(7)
    specs = [prompt(f"{n}", draw.randint(65, 600), draw.randint(1, 40), prefix=draw.choice([0, 64])) for n in range(60)]
    limits = replace(LIMITS, num_blocks=45, max_num_seqs=2)
    cluster = VirtualCluster(policy, topology, COSTS, limits)
    requests = cluster.run(arriving(specs, [0.01 * number for number in range(60)]))
    assert sorted(request.num_made_tokens for request in requests) == sorted(spec.max_tokens for spec in specs)
    for request in requests:
        assert request.num_left_tokens == 0 and request.first_token <= request.last_token
        assert request.num_held_tokens + request.num_fetched_tokens <= request.num_prompt_tokens
    for prefill in cluster._prefill.values():
        assert (prefill.pool.num_free, len(prefill.coming), prefill.num_queued_tokens) == (45, 0, 0)
    for decode in cluster._decode.values():
        assert (decode.pool.num_free, len(decode.coming), decode.num_sequences) == (45, 0, 0)
    cluster._index.check_integrity()


def test_a_request_that_no_pool_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="a request needs 7 blocks, a pool has 6"):
        served([Session(0.0, [prompt("a", 100, 12)])], ONE_EACH, limits=replace(LIMITS, num_blocks=6))


def test_a_pool_has_no_more_blocks_than_its_room_and_the_index_knows_those_that_are_stored() -> None:
    draw = Random(3)
    index = KVIndex(1000)
    pool = Pool("p", 20, index)
    chains = [[BlockHash(bytes([chain, block])) for block in range(6)] for chain in range(8)]
    in_use: list[list[BlockHash]] = []
    for _ in range(500):
        names = draw.choice(chains)[: draw.randint(1, 6)]
        if in_use and draw.random() < 0.5:
            pool.leave(in_use.pop(draw.randrange(len(in_use))))
        elif pool.num_taken(names) <= pool.num_free:
            pool.use(names)
            pool.store(names)
            in_use.append(names)
        assert 20 - pool.num_free == len({name for names in in_use for name in names})
        held = [pool.num_leading(chain) for chain in chains]
        assert held == [index.leading(chain).get("p", 0) for chain in chains]
        assert sum(held) <= len(pool._stored) <= 20


def test_the_command_prints_a_row_for_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--workload", "shared-prefix", "--num-prefixes", "2", "--prefix-len", "512", "--requests", "6"]
    for _ in range(2):
        main(["--topology", "1P+2D", "--sequence-price", "16", *load, "--request-rate", "inf"])
    first, second = (part.splitlines() for part in capsys.readouterr().out.split("times in ms")[1:])
    assert first == second  # the same load gives the same figures
    rows = [line.split() for line in first[3:]]
    assert [row[0] for row in rows] == ["prefix_aware", "price", "least_loaded", "round_robin"]
    assert {len(row) for row in rows} == {9, 10}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "1P", "--request-rate", "1"], "'1P' is no topology"),
        (["--request-rate", "1", "--concurrency", "3"], "--concurrency: nothing holds requests back"),
        (["--request-rate", "1", "--num-blocks", "8"], "--num-blocks: a request needs 36 blocks, a pool has 8"),
        (["--workload", "dataset", "--dataset", "p", "--request-rate", "1"], "--workload dataset: nobody counts"),
        (["--workload", "trace", "--trace", "/nowhere"], "--trace: cannot read /nowhere"),
        (["--request-rate", "1", "--nonsense", "3"], "nonsense"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
