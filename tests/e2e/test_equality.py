"""From client to client: tokens equal transformers', in both protocols, alone or with 15 other requests."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrelay.core.process.cgroup import available_cores
from tests.e2e.cluster import BLOCK_SIZE, Cluster, Oracle, some_token_ids
from tests.e2e.processes import process_of, processes_of

pytestmark = pytest.mark.timeout(120)

NUM_TOKENS = 24
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little dog who lived near the sea. Every morning the dog",
    "a",
    "Grüße aus 東京, 中文字符 and 🐈‍⬛ 👩‍👩‍👧 say",
    "The sun is a star. " * 30 + "The moon is",
)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt[:12])
def test_tokens_and_text_equal_transformers(cluster: Cluster, oracle: Oracle, prompt: str) -> None:
    response = cluster.router.generate(prompt, NUM_TOKENS)
    [output] = response.outputs
    prompt_tokens = len(oracle.encode(prompt))
    assert list(output.token_ids) == oracle.tokens(prompt, NUM_TOKENS)
    assert output.text == oracle.text(prompt, NUM_TOKENS) == cluster.router.text(prompt, NUM_TOKENS)
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (prompt_tokens, NUM_TOKENS)


@pytest.mark.parametrize("num_tokens", [1, BLOCK_SIZE, 4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 1, 700])
def test_every_block_travels(cluster: Cluster, oracle: Oracle, num_tokens: int) -> None:
    prompt = some_token_ids(num_tokens, seed=num_tokens)
    response = cluster.router.generate(prompt, NUM_TOKENS)
    trace = response.trace
    assert list(response.outputs[0].token_ids) == oracle.tokens(prompt, NUM_TOKENS)
    assert (trace.prefill_node, trace.decode_node) == ("prefill-0", "decode-0")
    assert trace.num_prompt_blocks == trace.num_transferred_blocks == -(-num_tokens // BLOCK_SIZE)
    assert (trace.num_computed_tokens, trace.num_cached_tokens) == (num_tokens, 0)
    assert 0 < trace.ttft_seconds < trace.e2e_seconds


def test_tokens_of_16_requests_at_a_time_equal_transformers(cluster: Cluster, oracle: Oracle) -> None:
    """Half of them go over gRPC, half over HTTP."""
    prompts = [some_token_ids(5 + 23 * i, seed=1000 + i) for i in range(16)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        tokens = [pool.submit(cluster.router.tokens, prompt, NUM_TOKENS) for prompt in prompts[::2]]
        texts = [pool.submit(cluster.router.text, prompt, NUM_TOKENS) for prompt in prompts[1::2]]
    assert [future.result() for future in tokens] == [oracle.tokens(prompt, NUM_TOKENS) for prompt in prompts[::2]]
    assert [future.result() for future in texts] == [oracle.text(prompt, NUM_TOKENS) for prompt in prompts[1::2]]


def test_http_tells_how_a_request_was_served(cluster: Cluster) -> None:
    how = cluster.router.complete(some_token_ids(40, seed=4), 2)["kvrelay"]
    assert (how["prefill_node"], how["decode_node"]) == ("prefill-0", "decode-0")
    assert how["num_transferred_blocks"] == how["num_prompt_blocks"] == 3
    assert how["num_computed_tokens"] == 40


def test_prefix_is_found_by_name(cluster: Cluster, oracle: Oracle) -> None:
    prefix = some_token_ids(20 * BLOCK_SIZE, seed=77)
    cluster.router.generate([*prefix, 20, 21, 22], NUM_TOKENS)
    prompt = [*prefix, 30, 31, 32, 33]
    response = cluster.router.generate(prompt, NUM_TOKENS)
    assert list(response.outputs[0].token_ids) == oracle.tokens(prompt, NUM_TOKENS)
    assert response.trace.num_computed_tokens == 4
    assert response.trace.num_cached_tokens == response.usage.cached_tokens == len(prefix)


def test_folders_in_the_working_directory_are_not_imported(cluster: Cluster, directory: Path) -> None:
    """The cluster was started in a directory where importing one of our packages fails; still, all of it runs."""
    modules = {argument for arguments in processes_of(cluster.model).values() for argument in arguments}
    assert {"router", "prefill_node", "decode_node"} <= modules & {path.name for path in directory.iterdir()}
    assert "picked up from the working directory" not in cluster.program.log.read_text()
    assert len(cluster.router.tokens("Hello", 2)) == 2


def test_idle_nodes_lend_their_cores(cluster: Cluster) -> None:
    """A request alone is always at one node: the other one's core is free, where there is one for each."""
    cluster.router.generate(some_token_ids(400, seed=5), NUM_TOKENS)
    lent = cluster.router.metric("kvrelay:node_steps_total", cores="lent")
    assert (lent > 0) == (available_cores() >= 2)
    assert cluster.router.metric("kvrelay:node_steps_total", cores="own") > 0


def test_nodes_keep_the_weights_once(cluster: Cluster) -> None:
    """One node has loaded them, and both have them mapped."""
    assert cluster.program.log.read_text().count("the weights are those that another node has loaded") == 1
    for module in ("prefill_node", "decode_node"):
        maps = Path(f"/proc/{process_of(cluster.model, module)}/maps").read_text()
        assert "memfd:kvrelay-weights" in maps
