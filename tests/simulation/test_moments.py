"""A single request, with one disaster at every moment of its life: its client has the right tokens or has left, and
nothing is left."""

from dataclasses import replace
from random import Random

import pytest

from kvrelay.core.generation.sampling_params import SamplingParams
from router.relay.prefill_client import PrefillClient
from router.request import RoutedRequest
from tests.simulation.client import LONG_TIMEOUT, Behaviour, Plan
from tests.simulation.cluster import ClusterConfig
from tests.simulation.faults import NthFault
from tests.simulation.node_config import BLOCK_SIZE, NodeConfig
from tests.simulation.running_node import NAMESPACE
from tests.simulation.scenario import Disaster, Scenario, Strike, run_scenario

_MOMENTS = [number * 0.005 for number in range(36)]
_SAMPLING = SamplingParams(n=2, max_tokens=8, seed=3, ignore_eos=True)
_PLAN = Plan(
    RoutedRequest("r", tuple(range(1, 5 * BLOCK_SIZE + 3)), _SAMPLING, NAMESPACE, timeout=LONG_TIMEOUT),
    Behaviour.PATIENT,
    0.0,
)
# Round robin takes the first of each kind; three chunks of prompt.
_CONFIG = ClusterConfig(policy="round_robin", node=NodeConfig(max_num_batched_tokens=8), longest_step=0.01)


@pytest.mark.parametrize("address", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("disaster", [Disaster.KILL, Disaster.PAUSE, Disaster.DRAIN, Disaster.CUT])
def test_a_node_struck_at_any_moment_changes_no_token(disaster: Disaster, address: str) -> None:
    migrations = 0
    for moment in _MOMENTS:
        strike = Strike(moment, disaster, address, seconds=20.0, drain_seconds=0.0)
        outcome = run_scenario(Scenario(_CONFIG, (_PLAN,), (strike,)), NthFault(0), Random(0))
        assert not outcome.failures, f"{moment:.3f}: {outcome.failures}"
        assert outcome.counts["complete"] == 1, f"{moment:.3f}: {outcome.counts}"
        migrations += outcome.counts["migrations"]
    assert migrations > 0


@pytest.mark.parametrize("struck", [("prefill-0",), ("decode-0",), ("prefill-0", "decode-0")], ids=" and ".join)
@pytest.mark.parametrize("disaster", [Disaster.KILL, Disaster.PAUSE, Disaster.DRAIN, Disaster.CUT])
def test_the_only_node_of_a_kind_struck_at_any_moment_changes_no_token(
    disaster: Disaster, struck: tuple[str, ...]
) -> None:
    """However long the node takes to come back, no placement is counted in vain."""
    config = replace(_CONFIG, num_prefill_nodes=1, num_decode_nodes=1, max_node_losses=len(struck))
    migrations = 0
    for moment in _MOMENTS:
        strikes = tuple(Strike(moment, disaster, address, seconds=20.0, drain_seconds=0.0) for address in struck)
        outcome = run_scenario(Scenario(config, (_PLAN,), strikes), NthFault(0), Random(0))
        assert not outcome.failures, f"{moment:.3f}: {outcome.failures}"
        assert outcome.counts["complete"] == 1, f"{moment:.3f}: {outcome.counts}"
        migrations += outcome.counts["migrations"]
    assert migrations > 0


@pytest.mark.parametrize(
    ("plan", "node_wait", "ending"),
    [
        (replace(_PLAN, request=replace(_PLAN.request, timeout=3.0)), 120.0, "DeadlineError"),
        (replace(_PLAN, behaviour=Behaviour.DISAPPEARS, disappears_after=3.0), 120.0, "disappeared"),
        (_PLAN, 3.0, "UnavailableError"),
    ],
    ids=["deadline", "client", "wait"],
)
def test_a_wait_for_a_node_ends_without_one(plan: Plan, node_wait: float, ending: str) -> None:
    config = replace(_CONFIG, num_prefill_nodes=1, num_decode_nodes=1, node_wait=node_wait)
    strike = Strike(0.05, Disaster.KILL, "decode-0", seconds=20.0)
    outcome = run_scenario(Scenario(config, (plan,), (strike,)), NthFault(0), Random(0))
    assert not outcome.failures
    assert outcome.counts[ending] == 1, outcome.counts


def test_a_stream_outlives_more_restarts_than_it_has_attempts() -> None:
    """Every node is restarted twice, one after the other. Each time the stream goes on elsewhere, with new tokens."""
    config = replace(_CONFIG, num_prefill_nodes=0, num_decode_nodes=3, max_node_losses=3, longest_step=0.3)
    sampling = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)
    plan = replace(_PLAN, request=replace(_PLAN.request, sampling=sampling))
    strikes = tuple(
        Strike(1.0 + 1.5 * number, Disaster.DRAIN, f"decode-{number % 3}", seconds=0.5, drain_seconds=0.2)
        for number in range(6)
    )
    outcome = run_scenario(Scenario(config, (plan,), strikes), NthFault(0), Random(0))
    assert not outcome.failures
    assert outcome.counts["complete"] == 1
    assert outcome.counts["migrations"] > config.max_node_losses


def test_a_request_that_has_lost_more_nodes_than_it_has_attempts_is_given_up() -> None:
    """Though another process is live by then where it has lost the first."""
    config = replace(_CONFIG, num_prefill_nodes=0, max_node_losses=1, node_wait=30.0, longest_step=10.0)
    strikes = tuple(Strike(1.0 + number, Disaster.KILL, f"decode-{number}", seconds=0.1) for number in range(2))
    outcome = run_scenario(Scenario(config, (_PLAN,), strikes), NthFault(0), Random(0))
    assert not outcome.failures
    assert outcome.counts["GivenUpError"] == 1, outcome.counts


def test_a_lease_is_renewed_for_as_long_as_its_prompt_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def renews_nothing(client: PrefillClient, lease_ids: list[str], *, timeout: float) -> None:
        """Lets every lease expire."""

    scenario = Scenario(replace(_CONFIG, lease_ttls=(0.3,), longest_step=2.0), (_PLAN,))
    assert not run_scenario(scenario, NthFault(0), Random(0)).failures
    monkeypatch.setattr(PrefillClient, "_renew", renews_nothing)
    assert run_scenario(scenario, NthFault(0), Random(0)).failures == ["1 leases have expired at prefill-0"]


def test_a_client_that_disappears_at_any_moment_leaves_nothing() -> None:
    endings: set[str] = set()
    for moment in _MOMENTS:
        plan = replace(_PLAN, behaviour=Behaviour.DISAPPEARS, disappears_after=moment)
        outcome = run_scenario(Scenario(_CONFIG, (plan,)), NthFault(0), Random(0))
        assert not outcome.failures, f"{moment:.3f}: {outcome.failures}"
        endings.update(ending for ending in ("disappeared", "complete") if outcome.counts[ending])
    assert endings == {"disappeared", "complete"}
