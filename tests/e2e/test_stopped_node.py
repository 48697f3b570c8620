"""Nodes that SIGSTOP stops, and that are not dead: clients see a stall of seconds, and a node that continues is used
again."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import router_at
from tests.e2e.cluster import BLOCK_SIZE, FREE_PORTS, SMALL, Cluster, Oracle, link_model, served, some_token_ids
from tests.e2e.processes import Program, program, wait_until
from tests.free_port import free_port

pytestmark = pytest.mark.timeout(180)

PROMPT = "Once upon a time"
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def module_cluster(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Iterator[Cluster]:
    model = link_model(tmp_path_factory.mktemp("cluster"))
    counts = ("--prefill-nodes", "2", "--decode-nodes", "2", "--local-prefill-max-tokens", "0")
    small_steps = ("--max-num-batched-tokens", "16")  # so that a long prefill can be caught in the middle
    with served(model, *SMALL, *counts, *small_steps, directory=directory) as running:
        yield running


@pytest.fixture
def two_of_each(module_cluster: Cluster) -> Iterator[Cluster]:
    """Yields the cluster of this module. A test that fails leaves no node stopped."""
    yield module_cluster
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        module_cluster.continue_node(name)


def busy_node(cluster: Cluster, role: str) -> str:
    [name] = [
        name
        for name in (f"{role}-0", f"{role}-1")
        if cluster.router.metric("kvrelay:node_requests_running", node=name) > 0
    ]
    return name


def wait_state(cluster: Cluster, name: str, state: str) -> None:
    cluster.router.wait_metric(1, "kvrelay:node_state", node=name, state=state)


def test_a_stream_goes_on_without_the_decode_node_that_was_stopped(two_of_each: Cluster, oracle: Oracle) -> None:
    cluster, stopped = two_of_each, ""
    pieces: list[str] = []
    traces: list[dict[str, Any]] = []
    for event in cluster.router.stream_text(PROMPT, MAX_TOKENS):
        pieces.extend(choice["text"] for choice in event["choices"])
        traces.extend([event["kvrelay"]] if event.get("kvrelay") else [])
        if len(pieces) == 20:
            stopped = busy_node(cluster, "decode")
            cluster.stop_node(stopped)
    assert "".join(pieces) == oracle.text(PROMPT, MAX_TOKENS)
    [trace] = traces
    assert trace["num_migrations"] == 1 and trace["decode_node"] != stopped
    wait_state(cluster, stopped, "lost")
    assert cluster.router.metric("kvrelay:node_heartbeat_age_seconds", node=stopped) > 1
    assert cluster.router.text(PROMPT, 20) == oracle.text(PROMPT, 20)
    cluster.continue_node(stopped)
    wait_state(cluster, stopped, "live")
    cluster.wait_idle()  # the node that continues has dropped the request that it lost
    assert cluster.router.metric("kvrelay:request_errors_total") == 0


def test_a_prefill_node_that_is_stopped_before_its_prefill_is_replaced(two_of_each: Cluster, oracle: Oracle) -> None:
    """Both requests that were sent to the node before the router could know, and those that come later, are served."""
    cluster = two_of_each
    cluster.stop_node("prefill-0")
    prompts = [f"{PROMPT} there were {number} little pigs" for number in range(4)]
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = cluster.router.text(prompts[number], 20)

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert answers == {number: oracle.text(prompt, 20) for number, prompt in enumerate(prompts)}
    wait_state(cluster, "prefill-0", "lost")
    assert cluster.router.metric("kvrelay:request_migrations_total", cause="prefill_node_lost") >= 1
    response = cluster.router.generate(f"{PROMPT} in a land far away", 5)
    assert response.trace.prefill_node == "prefill-1"
    cluster.continue_node("prefill-0")
    wait_state(cluster, "prefill-0", "live")
    cluster.wait_idle()
    assert cluster.router.metric("kvrelay:request_errors_total") == 0


def test_a_prefill_node_that_is_stopped_during_its_prefill_is_replaced(two_of_each: Cluster, oracle: Oracle) -> None:
    cluster = two_of_each
    prompt = some_token_ids(2500, seed=11)
    traces: list[Any] = []

    def ask() -> None:
        response = cluster.router.generate(prompt, 5)
        assert list(response.outputs[0].token_ids) == oracle.tokens(prompt, 5)
        traces.append(response.trace)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(
        lambda: cluster.router.metric("kvrelay:node_requests_running", role="prefill") > 0,
        lambda: "no prefill has begun",
    )
    stopped = busy_node(cluster, "prefill")
    cluster.stop_node(stopped)
    asking.join()
    [trace] = traces
    assert trace.num_migrations == 1 and trace.prefill_node != stopped
    cluster.continue_node(stopped)
    wait_state(cluster, stopped, "live")
    cluster.wait_idle()


def test_nothing_is_remembered_of_a_node_replaced_at_its_address(
    model: Path, directory: Path, tmp_path: Path, oracle: Oracle
) -> None:
    """The node is stopped, killed and started again with a new epoch; nothing is remembered of the old one."""
    address = f"127.0.0.1:{free_port()}"
    pools = tmp_path / "pools"  # the killed one's remains there
    pools.mkdir()
    prompt = some_token_ids(4 * BLOCK_SIZE + 1, seed=9)

    def decode(name: str) -> tuple[str, ...]:
        port = address.rpartition(":")[2]
        return ("decode", str(model), "--node-id", name, "--port", port, "--shared-memory-dir", str(pools), *SMALL)

    with (
        program(*decode("first"), log=tmp_path / "first.log", directory=directory) as first,
        program("router", str(model), *FREE_PORTS, "--decode-nodes", address, "--start-timeout", "30",
                log=tmp_path / "router.log", directory=directory) as running,
    ):  # fmt: skip
        first.wait_ready()
        with router_at(running.wait_ready()) as router:
            router.wait_metric(1, "kvrelay:node_up", node="first")
            assert router.generate(prompt, 8).trace.num_cached_tokens == 0
            assert router.generate(prompt, 8).trace.num_cached_tokens == 4 * BLOCK_SIZE
            first.process.send_signal(signal.SIGSTOP)
            router.wait_metric(1, "kvrelay:node_state", node="first", state="lost")
            status, answer = router.health()
            assert status == 503
            assert f"first ({address}) is lost" in answer["error"]["message"]
            first.kill()
            with program(*decode("second"), log=tmp_path / "second.log", directory=directory) as second:
                second.wait_ready()
                router.wait_metric(1, "kvrelay:node_state", node="second", state="live")
                assert router.health()[0] == 200
                response = router.generate(prompt, 8)
                assert list(response.outputs[0].token_ids) == oracle.tokens(prompt, 8)
                assert (response.trace.decode_node, response.trace.num_cached_tokens) == ("second", 0)
                end_all(running, second)


def end_all(*programs: Program) -> None:
    assert [ended.interrupt() for ended in programs] == [0] * len(programs)
