"""Seeds run without a failure, a seed always gives the same run, and faults planted on purpose are found."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kv_connector.base import FetchOutcome
from kv_connector.header import HEADER_BYTES
from kv_connector.pool import LocalPool, Rows, copy_payload
from kv_connector.store import redis_store
from kv_connector.tiered import TieredConnector
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.errors import UnavailableError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.kv.block_hash import BlockHash, block_hashes
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source_breakers import SourceBreakers
from kvrelay.core.rpc.wire import sampling_from_wire
from kvrelay.engine.engine import Engine
from kvrelay.engine.loop_calls import LoopCalls
from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.node import engine_request
from kvrelay.node.node import Node
from kvrelay.node.receiver import Receiver
from prefill_node.leases import LeaseTable
from router.relay.attempt import Attempt
from router.relay.charge import Charge
from router.relay.decode_client import DecodeSession
from router.relay.placer import Placer
from router.relay.prefill_client import PrefillClient
from router.relay.relay import ClusterRelay
from router.relay.resolved_placement import ResolvedPlacement
from router.relay.supervisor import RequestSupervisor
from router.request import NodeRequest
from tests.kv_connector.faulty import DamagingCopy
from tests.simulation.seeds import run_seed

ROOT = Path(__file__).parent.parent.parent
NUM_SEEDS = 200
_MOST_SEEDS_TO_FIND = 400  # a link is tried, and nothing heard of it, in one run of 200


def _simulate(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_seeds_run_clean_and_are_not_empty() -> None:
    summary = _simulate("--seeds", f"0:{NUM_SEEDS}")
    counts = {what: int(number) for number, what in (entry.split() for entry in summary.split(": ")[1].split(", "))}
    assert counts["runs"] == NUM_SEEDS
    assert counts["complete"] > counts["requests"] / 2
    happened = (
        *("migrations", "damaged", "damaged_by_store", "faults", "left", "refused", "overloaded"),
        *("KVRelayError", "UnavailableError", "DeadlineError", "CancelledByPeerError"),
        *("kill", "drain", "pause", "partition", "cut", "link", "pause_router", "kill_router"),
        *("store_down", "store_hangs", "store_full", "store_evicts"),
    )
    assert counts["run_ahead"] == NUM_SEEDS / 2
    assert all(counts[what] > 0 for what in happened)


def test_a_seed_replays_event_by_event() -> None:
    """The run is the same alone and after another one, also with clients that are left of a killed router."""
    alone = _simulate("--seed", "19", "--trace").splitlines()[:-1]  # the last line is the verdict
    behind = _simulate("--seeds", "18:20", "--trace").splitlines()[:-1]  # here it has the seconds it took
    assert len(alone) > 100
    assert behind[-len(alone) :] == alone
    assert len(behind) > len(alone)


def test_no_time_but_virtual_time_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(clock: MonotonicClock) -> float:
        raise AssertionError("the simulation reads the machine's clock")

    monkeypatch.setattr(MonotonicClock, "now", read)
    for seed in range(4):
        assert not run_seed(seed).failures


# -- planted faults ----------------------------------------------------------------------------------------------------


def _trusts_what_arrives(copy: DamagingCopy, destination: Rows, source: Rows) -> bytes:
    digest = copy_payload(destination, source)
    if copy._random.random() < copy.probability:
        destination[0] ^= 1
    return digest


def _trusts_the_store(pool: LocalPool, block: NamedBlock, value: bytes) -> FetchOutcome:
    if not value:
        return FetchOutcome.MISSING
    pool.rows[block.block_id][:] = memoryview(value)[HEADER_BYTES:]
    return FetchOutcome.FETCHED


def _forgets_to_release(client: PrefillClient, wire_id: str) -> None:
    """Keeps renewing the lease."""


def _does_not_send_the_release(client: PrefillClient, wire_id: str) -> None:
    """Lets the lease expire."""
    client._held.discard(wire_id)


def _does_not_hear_the_release(leases: LeaseTable, lease_ids: Sequence[str]) -> None:
    """Lets the leases expire."""


def _keeps_blocks_pinned(receiver: Receiver) -> None:
    """Leaves the blocks that were reserved for a transfer reserved."""


def _does_not_abort(session: DecodeSession, *, finished: bool) -> None:
    session._stream.remove(session._wire_id)


def _never_expires(leases: LeaseTable) -> None:
    """Keeps leases that nobody releases for ever."""


def _keeps_the_charge(charge: Charge) -> None:
    """Lets the node look busy for ever."""


def _names_too_early(engine: Engine, request_id: str, num_blocks: int) -> None:
    _deliver(engine, request_id, num_blocks + 1)


def _names_other_tokens_alike(sequence: EngineSequence, num_blocks: int) -> list[BlockHash]:
    size = sequence.block_size
    alike = [token_id // 32 for token_id in sequence.token_ids[: num_blocks * size]]
    return list(block_hashes(sequence._root, alike, size))


def _forgets_a_token(supervisor: RequestSupervisor, attempt: Attempt, event: Any) -> None:
    """Leaves a token out of what a replay is given."""
    _remember(supervisor, attempt, event)
    if isinstance(event, TokenOutput) and event.finish_reason is None and event.index in supervisor._tokens:
        tokens = supervisor._tokens[event.index]
        del tokens[1:2]


def _never_ends_a_trial(breakers: SourceBreakers, source: Any, attempt: Any) -> None:
    """Leaves a link that was tried to a prompt of which nothing will be heard."""


def _hears_of_no_node(supervisor: RequestSupervisor) -> None:
    """Lets requests wait on although a node is live."""


def _refuses_while_a_node_is_away(placer: Placer, node_request: NodeRequest, **options: Any) -> ResolvedPlacement:
    if not node_request.is_replay and any(node.complaint for node in placer._registry.nodes):
        raise UnavailableError("no decode node can serve now: one is away")
    return _place(placer, node_request, **options)


def _has_no_deadline(supervisor: RequestSupervisor) -> None:
    """Lets a request go on when its time is over."""


def _goes_on(relay: ClusterRelay, request_id: str, *index: int) -> None:
    """Lets a request that was aborted, or an output that is enough, go on."""


def _takes_any_number(relay: ClusterRelay, num_admitting: int = 0, num_wanted: int = 1) -> None:
    """Lets more requests run than may."""


async def _drains_for_ever(node: Node) -> None:
    node.draining = True
    await asyncio.Event().wait()


def _offers_for_ever(connector: TieredConnector[Any], block_ids: Sequence[int]) -> None:
    """Leaves headers of blocks that lose their content."""


def _loses_a_parameter(message: Any) -> SamplingParams:
    return replace(sampling_from_wire(message), frequency_penalty=0.0)


def _forgets_what_waited(calls: LoopCalls) -> None:
    calls._timer = None
    calls._calls.clear()


_deliver = Engine.deliver
_place = Placer.place
_remember = RequestSupervisor._remember

PLANTED: list[tuple[object, str, Callable[..., Any], str]] = [
    (DamagingCopy, "__call__", _trusts_what_arrives, "WrongKVError"),
    (redis_store, "_accept", _trusts_the_store, "WrongKVError"),
    (LoopCalls, "_interval_over", _forgets_what_waited, "output 0 is"),
    (Engine, "deliver", _names_too_early, "WrongKVError"),
    (EngineSequence, "block_hashes", _names_other_tokens_alike, "output 0 is"),
    (RequestSupervisor, "_remember", _forgets_a_token, "output 0 is"),
    (RequestSupervisor, "on_decode_node_live", _hears_of_no_node, "no decode node came"),
    (SourceBreakers, "abandoned", _never_ends_a_trial, "trials of links"),
    (PrefillClient, "release", _forgets_to_release, "leases"),
    (PrefillClient, "release", _does_not_send_the_release, "leases have expired"),
    (LeaseTable, "release", _does_not_hear_the_release, "leases have expired"),
    (Placer, "place", _refuses_while_a_node_is_away, "no decode node can serve now: one is away"),
    (RequestSupervisor, "_on_deadline", _has_no_deadline, "after the request had to be over"),
    (ClusterRelay, "abort", _goes_on, "after the request had to be over"),
    (ClusterRelay, "finish", _goes_on, "after the request had to be over"),
    (ClusterRelay, "check_capacity", _takes_any_number, "requests run at its router"),
    (Node, "drain", _drains_for_ever, "does not end its drain"),
    (LeaseTable, "sweep", _never_expires, "leases left"),
    (Receiver, "_discard", _keeps_blocks_pinned, "are still held"),
    (DecodeSession, "close", _does_not_abort, "requests left"),
    (Charge, "end", _keeps_the_charge, "queued tokens"),
    (TieredConnector, "retract", _offers_for_ever, "offers blocks"),
    (engine_request, "sampling_from_wire", _loses_a_parameter, "output 0 is"),
]


@pytest.mark.parametrize(("owner", "name", "planted", "symptom"), PLANTED, ids=[entry[2].__name__ for entry in PLANTED])
def test_planted_faults_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, planted: Callable[..., Any], symptom: str
) -> None:
    monkeypatch.setattr(owner, name, planted)
    for seed in range(_MOST_SEEDS_TO_FIND):
        if any(symptom in failure for failure in run_seed(seed).failures):
            return
    raise AssertionError(f"nobody has noticed {planted.__name__} in {_MOST_SEEDS_TO_FIND} seeds")
