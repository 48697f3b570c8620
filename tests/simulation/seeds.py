"""What a seed draws: a cluster, clients, disasters and faults.

Invariant: the same seed gives the same run, event by event.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

from kvrelay.core.generation.sampling_params import SamplingParams
from router.request import RoutedRequest
from tests.simulation.client import LONG_TIMEOUT, LONG_WAIT, Behaviour, Plan
from tests.simulation.cluster import ClusterConfig
from tests.simulation.faults import CALM, SeededFaults, draw_rates
from tests.simulation.node_config import BLOCK_SIZE, NodeConfig
from tests.simulation.oracle import VOCAB_SIZE
from tests.simulation.running_node import NAMESPACE
from tests.simulation.scenario import STORE_DISASTERS, Disaster, Outcome, Scenario, Strike, run_scenario
from tests.simulation.transports import ANY_HOST, SAME_HOST, STORE

_ARRIVAL_SECONDS = 6.0
_ROUTER_DISASTERS = (Disaster.PAUSE_ROUTER, Disaster.KILL_ROUTER)


def run_seed(seed: int, *, traced: bool = False) -> Outcome:
    """Draws the scenario of a seed, and runs it."""
    random = Random(seed)
    rates = draw_rates(random)
    config = _draw_cluster(
        random, damage=rates.damage, run_ahead=seed % 2 == 1, node_wait=1.0 if seed % 4 == 0 else LONG_WAIT
    )
    plans = _draw_plans(random, config)
    strikes: tuple[Strike, ...] = ()
    if rates != CALM:
        strikes = (*_draw_strikes(random, config), *_draw_broken_links(Random(f"links of {seed}"), config))
    longest_delay = random.choice((0.001, 0.005, 0.05))
    faults = SeededFaults(Random(random.getrandbits(64)), rates, longest_delay=longest_delay)
    return run_scenario(Scenario(config, plans, strikes), faults, random, traced=traced)


# -- the cluster -------------------------------------------------------------------------------------------------------


def _draw_cluster(random: Random, *, damage: float, run_ahead: bool, node_wait: float) -> ClusterConfig:
    num_prefill, num_decode = random.choice(((2, 2), (2, 2), (1, 1), (1, 1), (1, 2), (0, 2)))
    num_hosts, connectors = random.choice(
        (
            *[(1, (SAME_HOST,))] * 4,
            *[(2, (SAME_HOST, ANY_HOST)), (1, (SAME_HOST, STORE))],
            *[(2, (ANY_HOST, STORE)), (2, (SAME_HOST, ANY_HOST, STORE)), (2, (STORE,))],
        )
    )
    return ClusterConfig(
        num_prefill_nodes=num_prefill,
        num_decode_nodes=num_decode,
        node=_draw_node(random, run_ahead=run_ahead),
        variety=random.choice((0.0, 0.0, 0.3, 0.8)),
        policy=random.choice(("round_robin", "least_loaded", "prefix_aware", "prefix_aware")),
        local_prefill_max_tokens=random.choice((0, 8)),
        kv_index_capacity=random.choice((12, 10_000, 10_000)),
        max_concurrent_requests=random.choice((3, 1024, 1024)),
        max_node_losses=random.choice((3, 10)),
        node_wait=node_wait,
        lease_ttls=random.choice(((6.0,), (6.0,), (1.0,), (6.0, 2.0))),
        node_timeout=random.choice((0.5, 2.0)),
        node_silence=random.choice((2.0, 5.0)),
        longest_step=random.choice((0.005, 0.02, 0.1)),
        connectors=connectors,
        num_hosts=num_hosts,
        lends_cores=random.random() < 0.5,
        store_ttl=random.choice((1, 3600)),
        damage=damage,
    )


def _draw_node(random: Random, *, run_ahead: bool) -> NodeConfig:
    max_num_batched_tokens = random.choice((8, 16, 64))
    return NodeConfig(
        num_blocks=random.choice((12, 20, 32, 64)),
        max_num_seqs=min(random.choice((3, 4, 16)), max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        policy=random.choice(("fcfs", "fcfs", "priority")),
        stream_interval=random.choice((0.0, 0.008, 0.05)),
        run_ahead=run_ahead,
        samples_later=random.random() < 0.5,
    )


# -- the clients -------------------------------------------------------------------------------------------------------


def _draw_plans(random: Random, config: ClusterConfig) -> tuple[Plan, ...]:
    """Draws requests with shared prefixes, most of them from patient clients."""
    conversations = [_draw_tokens(random, random.randrange(1, 12 * BLOCK_SIZE)) for _ in range(3)]
    return tuple(_draw_plan(random, f"r{number}", conversations, config) for number in range(random.randrange(4, 13)))


def _draw_plan(random: Random, name: str, conversations: list[tuple[int, ...]], config: ClusterConfig) -> Plan:
    behaviours = [*[Behaviour.PATIENT] * 8, *Behaviour]
    prompt = _draw_prompt(random, random.choice(conversations), config.node.longest)
    is_hurried = random.random() < 0.1
    max_tokens = random.choice((1, 30, 30, 30, random.randrange(1, 31)))
    max_tokens = min(max_tokens, config.node.longest - len(prompt))
    request = RoutedRequest(
        name,
        prompt,
        _draw_sampling(random, max_tokens),
        NAMESPACE,
        priority=random.choice((0, 0, 0, 5, -5)),
        cache_salt=b"salt" if random.random() < 0.1 else b"",
        timeout=random.uniform(0.05, 3.0) if is_hurried else LONG_TIMEOUT,
    )
    return Plan(
        request,
        random.choice(behaviours),
        arrives_at=random.uniform(0.0, _ARRIVAL_SECONDS),
        router=random.randrange(len(config.lease_ttls)),
        enough=random.randrange(0, max_tokens + 1),
        disappears_after=random.expovariate(2.0),
        longest_pause=random.uniform(0.0, 0.5) if random.random() < 0.1 else 0.0,
    )


def _draw_prompt(random: Random, shared: tuple[int, ...], max_model_len: int) -> tuple[int, ...]:
    """Draws a prompt that may begin like others. Some have lengths at which something ends: one token, full blocks, all
    that a node takes."""
    own = _draw_tokens(random, random.randrange(1, 2 * BLOCK_SIZE))
    prompt = (*shared[: random.randrange(len(shared) + 1)], *own)[: max_model_len // 2]
    match random.randrange(12):
        case 0:
            return prompt[:1]
        case 1 | 2:
            return (*prompt, *own * BLOCK_SIZE)[: -(-len(prompt) // BLOCK_SIZE) * BLOCK_SIZE]
        case 3:
            return (*prompt, *_draw_tokens(random, max_model_len))[: max_model_len - random.choice((1, 2, BLOCK_SIZE))]
        case _:
            return prompt


def _draw_sampling(random: Random, max_tokens: int) -> SamplingParams:
    sampling = SamplingParams(
        n=random.choice((1, 1, 1, 1, 2, 3)),
        max_tokens=max_tokens,
        min_tokens=random.choice((0, 0, 0, random.randrange(max_tokens + 1))),
        seed=random.getrandbits(32),
        ignore_eos=random.random() < 0.7,
        stop_token_ids=_draw_tokens(random, random.choice((0, 0, 1, 4))),
        logprobs=1 if random.random() < 0.2 else None,
        prompt_logprobs=1 if random.random() < 0.1 else None,
    )
    if random.random() < 0.8:
        return sampling
    return replace(
        sampling,
        temperature=0.5,
        top_k=random.choice((0, 5)),
        logit_bias={random.randrange(VOCAB_SIZE): 1.5, random.randrange(VOCAB_SIZE): -2.0},
        repetition_penalty=random.choice((1.0, 1.5)),
        presence_penalty=random.choice((0.0, 0.5)),
        frequency_penalty=random.choice((0.0, 0.25)),
    )


def _draw_tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(1, VOCAB_SIZE) for _ in range(count))


# -- the disasters -----------------------------------------------------------------------------------------------------


def _draw_strikes(random: Random, config: ClusterConfig) -> tuple[Strike, ...]:
    disasters: list[Disaster] = [Disaster.KILL, *Disaster]
    disasters.remove(Disaster.KILL_ROUTER)
    disasters.remove(Disaster.LINK)
    if STORE not in config.connectors:
        disasters = [one for one in disasters if one not in STORE_DISASTERS]
    if random.random() < 0.1:
        disasters += [Disaster.KILL_ROUTER] * len(disasters)
    return tuple(_draw_strike(random, disasters, config) for _ in range(random.randrange(0, 6)))


def _draw_broken_links(random: Random, config: ClusterConfig) -> tuple[Strike, ...]:
    """Draws which pairs of nodes do not reach each other: in every other run, some or all."""
    probability = random.choice((0.0, 0.0, 0.3, 1.0))
    pairs = combinations((*config.prefill_addresses, *config.decode_addresses), 2)
    return tuple(
        Strike(
            at=random.uniform(0.0, _ARRIVAL_SECONDS / 2),
            disaster=Disaster.LINK,
            address=address,
            other=other,
            seconds=random.choice((0.3, 3.0, 20.0)),
        )
        for address, other in pairs
        if random.random() < probability
    )


def _draw_strike(random: Random, disasters: Sequence[Disaster], config: ClusterConfig) -> Strike:
    disaster = random.choice(disasters)
    nodes = [*config.prefill_addresses, *config.decode_addresses]
    restarts = disaster in (Disaster.KILL, Disaster.DRAIN)
    return Strike(
        at=random.uniform(0.0, _ARRIVAL_SECONDS + 4.0),
        disaster=disaster,
        address=random.choice(config.router_names if disaster in _ROUTER_DISASTERS else nodes),
        seconds=random.choice((0.0, 0.05, 0.5, 3.0) if restarts else (0.1, 1.0, 8.0, 20.0)),
        drain_seconds=random.choice((0.0, 0.2, 3.0)),
    )
