"""One request whose first message or connector call fails, then its second, and so on until a run has none that fails:
the client always has the right tokens, and nothing is left."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from kvrelay.core.generation.sampling_params import SamplingParams
from router.request import RoutedRequest
from tests.kv_connector.faulty import ConnectorFault
from tests.simulation.client import LONG_TIMEOUT, Behaviour, Plan
from tests.simulation.cluster import ClusterConfig
from tests.simulation.faults import NthFault
from tests.simulation.network import Fate, Message
from tests.simulation.node_config import BLOCK_SIZE, NodeConfig
from tests.simulation.running_node import NAMESPACE
from tests.simulation.scenario import Scenario, run_scenario

_MOST_CALLS = 400
_PROMPT = tuple(range(1, 5 * BLOCK_SIZE + 3))  # five blocks and a tail
_GREEDY = SamplingParams(max_tokens=2 * BLOCK_SIZE, seed=1, ignore_eos=True)
_CONFIG = ClusterConfig(policy="round_robin", node=NodeConfig(max_num_batched_tokens=8))  # three chunks


def _plan(name: str, sampling: SamplingParams, *, prompt: tuple[int, ...] = _PROMPT, arrives_at: float = 0.0) -> Plan:
    return Plan(RoutedRequest(name, prompt, sampling, NAMESPACE, timeout=LONG_TIMEOUT), Behaviour.PATIENT, arrives_at)


# The second request of "prefix" finds the first one's blocks at nodes that round robin does not choose again: prefill
# nodes fetch from others.
SCENARIOS = {
    "greedy": Scenario(_CONFIG, (_plan("r", _GREEDY),)),
    "parallel": Scenario(_CONFIG, (_plan("r", replace(_GREEDY, n=2)),)),
    "logprobs": Scenario(_CONFIG, (_plan("r", replace(_GREEDY, logprobs=1, prompt_logprobs=1)),)),
    "prefix": Scenario(
        _CONFIG, (_plan("r", _GREEDY), _plan("s", replace(_GREEDY, seed=2), prompt=(*_PROMPT, 7, 8), arrives_at=1.0))
    ),
    "decode nodes only": Scenario(replace(_CONFIG, num_prefill_nodes=0), (_plan("r", _GREEDY),)),
}


def _fail_each(scenario: Scenario, make: Callable[[int], NthFault], *, first: int = 1) -> set[str]:
    """Runs the scenario for each n until nothing fails any more; returns which messages or calls have failed."""
    places: set[str] = set()
    for number in range(first, _MOST_CALLS):
        faults = make(number)
        outcome = run_scenario(scenario, faults, Random(0))
        assert not outcome.failures, f"{number}, {faults.where}: {outcome.failures}"
        assert outcome.counts["complete"] == len(scenario.plans), f"{number}, {faults.where}: {outcome.counts}"
        if not faults.where:
            return places
        places.add(faults.where)
    raise AssertionError("there is no end to what can fail")


def _is_of_a_request(message: Message) -> bool:
    """Returns False for the watch streams, which go on for ever; the seeds break them."""
    return not message.method.startswith("/kvrelay.v1.Node/")


@pytest.mark.parametrize("fate", [fate for fate in Fate if fate not in (Fate.DELIVER, Fate.DUPLICATE)])
@pytest.mark.parametrize("shape", ["greedy", "decode nodes only"])
def test_whichever_message_fails_the_client_has_the_right_tokens(shape: str, fate: Fate) -> None:
    places = _fail_each(SCENARIOS[shape], lambda n: NthFault(n, fate=fate, counts=_is_of_a_request))
    assert {"/kvrelay.v1.DecodeNode/Serve request", "/kvrelay.v1.DecodeNode/Serve response"} <= places


@pytest.mark.parametrize("shape", ["parallel", "logprobs", "prefix"])
def test_whichever_message_is_lost_with_its_connection_the_client_has_the_right_tokens(shape: str) -> None:
    places = _fail_each(SCENARIOS[shape], lambda n: NthFault(n, fate=Fate.LOSE, counts=_is_of_a_request))
    assert {"/kvrelay.v1.PrefillNode/Serve request", "/kvrelay.v1.PrefillNode/Serve response"} <= places


@pytest.mark.parametrize("earlier", [8, 21])
def test_whichever_message_of_a_replay_is_lost_the_client_has_the_right_tokens(earlier: int) -> None:
    """An earlier connection was lost during the prefill, or when the client had tokens."""
    scenario = SCENARIOS["parallel"]
    places = _fail_each(
        scenario,
        lambda n: NthFault(n, fate=Fate.LOSE, counts=_is_of_a_request, earlier=earlier),
        first=earlier + 1,
    )
    assert "/kvrelay.v1.DecodeNode/Serve request" in places


@pytest.mark.parametrize("fault", ConnectorFault)
@pytest.mark.parametrize("shape", ["greedy", "parallel", "prefix"])
def test_whichever_connector_call_fails_the_client_has_the_right_tokens(shape: str, fault: ConnectorFault) -> None:
    places = _fail_each(SCENARIOS[shape], lambda n: NthFault(n, connector=fault))
    assert places == {"publish", "fetch"}


def test_a_prompt_of_one_token_has_logprobs_too() -> None:
    """There is none to report, but the client gets an empty list, wherever the prompt was computed."""
    plan = _plan("r", replace(_GREEDY, prompt_logprobs=1), prompt=(5,))
    for num_prefill_nodes in (0, 1):
        scenario = Scenario(replace(_CONFIG, num_prefill_nodes=num_prefill_nodes), (plan,))
        outcome = run_scenario(scenario, NthFault(0), Random(0))
        assert not outcome.failures
