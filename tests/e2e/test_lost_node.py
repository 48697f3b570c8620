"""`kill -9` of the decode node that serves a stream: its client sees nothing of it, and the node comes back."""

from pathlib import Path

import pytest

from tests.e2e.cluster import SMALL, Oracle, served

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
        cluster.kill("router")
        cluster.program.wait_log("router serves again")
        assert cluster.router.text(PROMPT, 20) == oracle.text(PROMPT, 20), "at the same port"
