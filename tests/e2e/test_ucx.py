"""`kvrelay serve --connector ucx`: blocks move between the nodes' processes over UCX."""

from pathlib import Path

import pytest

from tests.e2e.cluster import BLOCK_SIZE, SMALL, Oracle, served, some_token_ids
from tests.e2e.processes import segments_of

pytestmark = pytest.mark.timeout(120)


def test_blocks_travel_through_ucx(model: Path, directory: Path, oracle: Oracle) -> None:
    arguments = ("--connector", "ucx", "--local-prefill-max-tokens", "0")
    prompt = some_token_ids(5 * BLOCK_SIZE + 3, seed=6)
    with served(model, *SMALL, *arguments, directory=directory) as cluster:
        response = cluster.router.generate(prompt, 20)
        assert list(response.outputs[0].token_ids) == oracle.tokens(prompt, 20)
        assert response.trace.num_transferred_blocks == response.trace.num_prompt_blocks == 6
        assert segments_of(model) == set()
