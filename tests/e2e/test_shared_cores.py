"""Nodes that lend each other cores: who computes a prompt, and that its tokens do not depend on it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.client import load_when
from tests.e2e.cluster import SMALL, Oracle, served, some_token_ids

pytestmark = pytest.mark.timeout(120)

NUM_STREAMS = 4
NUM_STREAM_TOKENS = 700
NUM_TOKENS = 8


def test_beside_decodes_the_decode_node_computes_prompts_itself(model: Path, directory: Path, oracle: Oracle) -> None:
    with served(model, *SMALL, directory=directory) as cluster, ThreadPoolExecutor(NUM_STREAMS) as pool:
        alone = some_token_ids(300, seed=0)
        response = cluster.router.generate(alone, NUM_TOKENS)
        assert response.trace.prefill_node == "prefill-0"
        assert list(response.outputs[0].token_ids) == oracle.tokens(alone, NUM_TOKENS)

        streams = [pool.submit(cluster.router.tokens, [20 + i], NUM_STREAM_TOKENS) for i in range(NUM_STREAMS)]
        assert load_when(cluster.node_address("decode-0"), lambda load: load.num_requests_decoding > 0)
        prefill_nodes: list[str] = []
        beside: list[tuple[list[int], list[int]]] = []  # prompts and their outputs
        while "" not in prefill_nodes and not all(stream.done() for stream in streams):
            prompt = some_token_ids(300, seed=1 + len(beside))
            response = cluster.router.generate(prompt, NUM_TOKENS)
            prefill_nodes.append(response.trace.prefill_node)
            beside.append((prompt, list(response.outputs[0].token_ids)))
        assert "" in prefill_nodes
        outputs = [stream.result() for stream in streams]  # first: the oracle takes the cores that they decode on
        for prompt, output in beside:
            assert output == oracle.tokens(prompt, NUM_TOKENS)
        for i, output in enumerate(outputs):
            assert len(output) == NUM_STREAM_TOKENS and output == oracle.choices([20 + i], output)
