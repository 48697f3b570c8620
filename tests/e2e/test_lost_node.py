"""`kill -9` of nodes that serve a stream: its client sees at most a stall, and the nodes come back."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e.client import grpc_request
from tests.e2e.cluster import SMALL, Oracle, served, some_token_ids

pytestmark = pytest.mark.timeout(120)

PROMPT = "Once upon a time"
MAX_TOKENS = 400


def test_a_stream_survives_the_decode_node_that_serves_it(
    model: Path, directory: Path, tmp_path: Path, oracle: Oracle
) -> None:
    pools = tmp_path / "pools"  # the killed node's remains there
    pools.mkdir()
    arguments = (*SMALL, "--decode-nodes", "2", "--local-prefill-max-tokens", "0", "--shared-memory-dir", str(pools))
    with served(model, *arguments, directory=directory) as cluster:
        pieces: list[str] = []
        traces = []
        for event in cluster.router.stream_text(PROMPT, MAX_TOKENS):
            pieces.extend(choice["text"] for choice in event["choices"])
            traces.extend([event["kvrelay"]] if event.get("kvrelay") else [])
            if len(pieces) == 20:
                [serving] = [
                    name
                    for name in ("decode-0", "decode-1")
                    if cluster.router.metric("kvrelay:node_requests_running", node=name) > 0
                ]
                cluster.kill(serving)
        assert "".join(pieces) == oracle.text(PROMPT, MAX_TOKENS)
        [trace] = traces
        assert (trace["num_migrations"], trace["prefill_node"]) == (1, "prefill-0")
        assert {serving, trace["decode_node"]} == {"decode-0", "decode-1"}
        assert cluster.router.metric("kvrelay:request_migrations_total", cause="decode_node_lost") == 1
        assert cluster.router.metric("kvrelay:request_errors_total") == 0
        assert cluster.router.text(PROMPT, 20) == oracle.text(PROMPT, 20), "the other one serves all that comes"
        cluster.program.wait_log(f"{serving} serves again")
        killed = rf"\[serve\] 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ {serving} was killed by SIGKILL"
        assert re.search(killed, cluster.program.log.read_text()), "with the time, as in the lines beside it"
        for pool in pools.glob(f"kvrelay-{trace['decode_node']}-*"):
            pool.unlink()
        assert cluster.router.text("Long, long ago", 40) == oracle.text("Long, long ago", 40), "whoever serves it"
        cluster.program.wait_log(f"{trace['decode_node']} serves again")
        assert "from which peers copy KV, was removed" in cluster.program.log.read_text()
        cluster.kill("router")
        cluster.program.wait_log("router serves again")
        assert cluster.router.text(PROMPT, 20) == oracle.text(PROMPT, 20), "at the same port"


def test_streams_wait_for_the_only_nodes_to_come_back(
    model: Path, directory: Path, tmp_path: Path, oracle: Oracle
) -> None:
    pools = tmp_path / "pools"
    pools.mkdir()
    pool = ("--gpu-memory-utilization", "0.02", "--shared-memory-dir", str(pools))  # of RAM that changes all the time
    arguments = ("--dtype", "float32", *pool, "--local-prefill-max-tokens", "0", "--max-node-losses", "2")
    with served(model, *arguments, directory=directory) as cluster:
        router = cluster.router
        pieces: list[str] = []
        traces = []
        for event in router.stream_text(PROMPT, MAX_TOKENS):
            pieces.extend(choice["text"] for choice in event["choices"])
            traces.extend([event["kvrelay"]] if event.get("kvrelay") else [])
            if len(pieces) == 20:
                cluster.kill("decode-0")
                router.wait_metric(1, "kvrelay:node_state", node="decode-0", state="lost")
                status, answer = router.post("/v1/completions", json.dumps({"prompt": PROMPT}))
                assert status == 503 and "no decode node can serve now" in answer["error"]["message"]
        assert "".join(pieces) == oracle.text(PROMPT, MAX_TOKENS)
        [trace] = traces
        assert (trace["num_migrations"], trace["decode_node"]) == (1, "decode-0")

        prompt = some_token_ids(200, seed=3)
        cluster.stop_node("prefill-0")  # so that its end comes before the first token
        stream = router.stream(grpc_request(prompt, 50))
        router.wait_metric(1, "kvrelay:num_requests_running")
        for name in ("prefill-0", "decode-0"):
            cluster.kill(name)
        tokens = [token for answer in stream for output in answer.outputs for token in output.token_ids]
        assert tokens == oracle.tokens(prompt, 50)
        assert router.metric("kvrelay:request_errors_total") == 1, "of the new request that was refused"
        for name in ("prefill-0", "decode-0"):
            sizes = re.findall(rf"{name}: (\d+) blocks", cluster.program.log.read_text())
            assert len(sizes) >= 2 and len(set(sizes)) == 1, "with the pool that it had"
