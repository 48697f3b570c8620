"""`kvrelay prefill`, `decode` and `router`, each started by hand, joined by a static list of addresses.

One decode node has another dtype and comes late, at an address that the routers know already.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.client import Router, grpc_request, router_at
from tests.e2e.cluster import BLOCK_SIZE, FREE_PORTS, SMALL, Oracle, link_model, some_token_ids
from tests.e2e.processes import PATIENCE_SECONDS, Program, processes_of, program, segments_of
from tests.free_port import free_port

pytestmark = pytest.mark.timeout(120)

NUM_TOKENS = 64  # takes many times as long as the news of a block on its way to the router


@dataclass(frozen=True, slots=True)
class HandMade:
    """Two routers over the same nodes: `router` knows prefill-a, prefill-b, decode-a and the late decode node,
    `lonely_router` only prefill-a and the late one."""

    router: Router
    lonely_router: Router
    router_log: Path
    late_address: str


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, directory: Path) -> Iterator[HandMade]:
    logs = tmp_path_factory.mktemp("by-hand")
    model = link_model(logs)
    programs: list[Program] = []
    with ExitStack() as stack:

        def start(name: str, *arguments: str) -> Program:
            running = program(*arguments[:1], str(model), *arguments[1:], log=logs / f"{name}.log", directory=directory)
            programs.append(stack.enter_context(running))
            return programs[-1]

        node_ids = ("prefill-a", "prefill-b", "decode-a")
        settings = ("--threads", "1", "--stream-interval", "0.1", *SMALL)
        nodes = [start(name, name.split("-")[0], "--node-id", name, *settings) for name in node_ids]
        prefill_a, prefill_b, decode_a = (str(node.wait_ready()["address"]) for node in nodes)
        late_port = free_port()
        late = f"127.0.0.1:{late_port}"
        router_arguments = (
            *FREE_PORTS,
            "--policy",
            "round_robin",
            "--start-timeout",
            "0",
            "--served-model-name",
            "demo",
        )
        routers = [
            start(name, "router", *router_arguments, "--prefill-nodes", prefill, "--decode-nodes", decode)
            for name, prefill, decode in (
                ("router", f"{prefill_a},{prefill_b}", f"{decode_a},{late}"),
                ("lonely-router", prefill_a, late),
            )
        ]
        router, lonely = (stack.enter_context(router_at(program.wait_ready())) for program in routers)
        for node_id in node_ids:
            router.wait_metric(1, "kvrelay:node_up", node=node_id)
        lonely.wait_metric(1, "kvrelay:node_up", node="prefill-a")
        misfit = ("--dtype", "bfloat16", "--num-blocks", "512", "--threads", "1")
        start("late", "decode", "--node-id", "decode-late", "--port", str(late_port), *misfit).wait_ready()
        for running in routers:
            running.wait_log(f"({late}) is refused")
        yield HandMade(router, lonely, logs / "router.log", late)
        segments = segments_of(model)
        for running in programs:
            running.press_ctrl_c()
        assert [running.process.wait(PATIENCE_SECONDS) for running in programs] == [0] * len(programs)
        assert processes_of(model) == {}
        assert [path for path in segments if path.exists()] == []


def test_tokens_equal_and_a_prefix_is_found_on_the_other_prefill_node(cluster: HandMade, oracle: Oracle) -> None:
    """Requests take turns: the second one lands where nobody has seen its prefix, and still computes only its end."""
    prefix = some_token_ids(30 * BLOCK_SIZE, seed=3)
    seen = []
    for suffix, num_computed in (([40, 41, 42], len(prefix) + 3), ([50, 51], 2)):
        prompt = [*prefix, *suffix]
        response = cluster.router.generate(prompt, NUM_TOKENS)
        assert list(response.outputs[0].token_ids) == oracle.tokens(prompt, NUM_TOKENS)
        assert response.trace.decode_node == "decode-a"
        assert response.trace.num_computed_tokens == num_computed
        seen.append(response.trace.prefill_node)
    assert sorted(seen) == ["prefill-a", "prefill-b"]


def test_tokens_of_a_stream_travel_together(cluster: HandMade, oracle: Oracle) -> None:
    prompt = some_token_ids(BLOCK_SIZE, seed=4)
    messages = cluster.router.stream(grpc_request(prompt, NUM_TOKENS))
    pieces = [list(output.token_ids) for message in messages for output in message.outputs]
    assert [token_id for piece in pieces for token_id in piece] == oracle.tokens(prompt, NUM_TOKENS)
    assert len(pieces) < NUM_TOKENS / 2


def test_node_of_another_dtype_is_not_paired(cluster: HandMade, oracle: Oracle) -> None:
    log = cluster.router_log.read_text()
    assert f"decode node decode-late ({cluster.late_address}) is refused: KV dtype is bfloat16, not float32 (as " in log
    assert cluster.router.metric("kvrelay:node_up", role="decode") == 1
    prompt = "The capital of France is"
    assert [cluster.router.text(prompt, 8) for _ in range(3)] == [oracle.text(prompt, 8)] * 3


def test_without_a_decode_node_that_fits_the_answer_is_503_with_the_reason(cluster: HandMade) -> None:
    status, answer = cluster.lonely_router.post("/v1/completions", '{"prompt": "Hello"}')
    assert status == 503
    expected = (
        f"no decode node can serve now: decode-late ({cluster.late_address}) is refused: KV dtype is bfloat16, not "
    )
    assert answer["error"]["message"].startswith(f"{expected}float32 (as prefill-a (")
    assert cluster.lonely_router.health() == (status, answer)
