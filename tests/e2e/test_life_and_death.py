"""How a cluster ends, in order or not, and what it says when it cannot start. Nothing of it may be left."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvrelay.core.process.weight_store import WeightStore
from tests.demo_model import DEMO_MODEL
from tests.e2e.client import grpc_request, router_at
from tests.e2e.cluster import FREE_PORTS, SMALL, Oracle, link_model, served
from tests.e2e.processes import (
    PATIENCE_SECONDS,
    process_of,
    processes_of,
    program,
    segments_of,
    wait_until_gone,
)

pytestmark = pytest.mark.timeout(120)

PROMPT = "Once upon a time"


def test_ctrl_c_ends_everything(model: Path, directory: Path) -> None:
    """The cluster ends in the middle of a stream, with pools in the system's shared memory."""
    command = ("serve", str(model), *FREE_PORTS, *SMALL, "--json-ready")
    with program(*command, log=model.with_suffix(".log"), directory=directory) as serve:
        ready = serve.wait_ready()
        segments = segments_of(model)
        assert {path.parent for path in segments} == {Path("/dev/shm")} and len(segments) == 2
        assert len(processes_of(model)) == 4, "serve, two nodes, a router"
        with router_at(ready) as router:
            stream = router.stream(grpc_request(PROMPT, 3500))
            next(stream)
            assert serve.interrupt() == 0, serve.log.read_text()
            stream.cancel()
        assert processes_of(model) == {}
        assert [path for path in segments if path.exists()] == []
        assert "Traceback" not in serve.log.read_text()


def test_a_second_ctrl_c_ends_everything_sooner(model: Path, directory: Path) -> None:
    """The second one comes while the router waits for the end of a stream."""
    command = ("serve", str(model), *FREE_PORTS, *SMALL, "--json-ready", "--stop-timeout", "100")
    with program(*command, log=model.with_suffix(".log"), directory=directory) as serve:
        ready = serve.wait_ready()
        segments = segments_of(model)
        with router_at(ready) as router:
            stream = router.stream(grpc_request(PROMPT, 3500))
            next(stream)
            serve.press_ctrl_c()
            serve.wait_log("stopping")
            assert serve.interrupt() == 0, serve.log.read_text()
            with pytest.raises(grpc.RpcError):  # it was cut off
                list(stream)
        assert processes_of(model) == {}
        assert [path for path in segments if path.exists()] == []
        assert "Traceback" not in serve.log.read_text()


def test_a_second_sigterm_ends_a_nodes_drain(model: Path, directory: Path) -> None:
    """The first one leaves a request ten minutes to end, which is cut off by the second."""
    decode = ("decode", str(model), *SMALL, "--threads", "1", "--drain-timeout", "600")
    with program(*decode, log=model.with_suffix(".node.log"), directory=directory) as node:
        address = str(node.wait_ready()["address"])
        segments = segments_of(model)
        router = ("router", str(model), *FREE_PORTS, "--decode-nodes", address, "--node-wait", "0")
        with (
            program(*router, log=model.with_suffix(".log"), directory=directory) as running,
            router_at(running.wait_ready()) as client,
        ):
            stream = client.stream(grpc_request(PROMPT, 3500))
            next(stream)
            node.process.send_signal(signal.SIGTERM)
            node.wait_log("draining for at most 600 s")
            assert node.process.poll() is None
            node.process.send_signal(signal.SIGTERM)
            assert node.process.wait(PATIENCE_SECONDS) == 0, node.log.read_text()
            with pytest.raises(grpc.RpcError):  # it was cut off
                list(stream)
            assert running.interrupt() == 0, running.log.read_text()
        assert processes_of(model) == {}
        assert segments and [path for path in segments if path.exists()] == []
        assert "Traceback" not in node.log.read_text()


def test_a_node_that_still_loads_ends_at_ctrl_c(model: Path, directory: Path) -> None:
    """It waits for weights that another node, which is this test, never finishes."""
    descriptor = WeightStore.create()
    command = ("decode", str(model), *SMALL, "--weight-store", str(descriptor))
    try:
        with (
            WeightStore(descriptor).turn(pytest.fail),
            program(*command, log=model.with_suffix(".log"), directory=directory, descriptors=(descriptor,)) as node,
        ):
            node.wait_log("waiting for the weights that another node loads")
            assert node.interrupt() == 0, node.log.read_text()
            assert node.process.stdout is not None and node.process.stdout.read() == "", "it is not ready"
            assert "Traceback" not in node.log.read_text()
    finally:
        os.close(descriptor)


def test_the_next_cluster_removes_what_a_killed_one_left(
    model: Path, directory: Path, tmp_path: Path, oracle: Oracle
) -> None:
    """The processes that still live notice that the others were killed and end. The next cluster, which has no prefill
    node, removes the pool of the killed node."""
    pools = tmp_path / "pools"
    pools.mkdir()
    settings = (*SMALL, "--shared-memory-dir", str(pools))
    command = ("serve", str(model), *FREE_PORTS, *settings, "--json-ready")
    with program(*command, log=model.with_suffix(".log"), directory=directory) as serve:
        serve.wait_ready()
        serve.process.send_signal(signal.SIGSTOP)  # or it would notice that a node has been killed
        os.kill(process_of(model, "decode_node"), signal.SIGKILL)
        serve.kill()
        wait_until_gone(model)
    [orphan] = pools.iterdir()
    assert "decode-0" in orphan.name, "the prefill node has ended in order"

    second = link_model(tmp_path / "second")
    with served(second, *settings, "--prefill-nodes", "0", directory=directory) as cluster:
        assert not orphan.exists()
        assert {path.parent for path in segments_of(second)} == {pools}
        response = cluster.router.generate(PROMPT, 16)
        assert list(response.outputs[0].token_ids) == oracle.tokens(PROMPT, 16)
        assert (response.trace.prefill_node, response.trace.decode_node) == ("", "decode-0")
        assert response.trace.num_transferred_blocks == 0
        assert len(processes_of(second)) == 3, "serve, a node, a router"
    assert list(pools.iterdir()) == []


def weightless(directory: Path, **config: Any) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").symlink_to(DEMO_MODEL / "tokenizer.json")
    return directory


def test_a_model_that_cannot_be_served_is_named_with_the_reason(tmp_path: Path, directory: Path) -> None:
    """One is refused before any node starts, the other by the node. Both start at the same time, to save some."""
    foreign = weightless(tmp_path / "foreign", architectures=["GPT2LMHeadModel"], model_type="gpt2")
    incomplete = weightless(tmp_path / "incomplete", model_type="llama")
    says = {
        foreign: "['GPT2LMHeadModel'] is not supported; supported are",
        incomplete: f"{incomplete} has neither model.safetensors nor",
    }
    arguments = (*FREE_PORTS, "--prefill-nodes", "0")
    with (
        program("serve", str(foreign), *arguments, log=tmp_path / "1.log", directory=directory) as first,
        program("serve", str(incomplete), *arguments, log=tmp_path / "2.log", directory=directory) as second,
    ):
        for serve, path in ((first, foreign), (second, incomplete)):
            output, _ = serve.process.communicate()
            log = serve.log.read_text()
            assert (serve.process.returncode, output) == (1, ""), log
            assert says[path] in log
            assert "Traceback" not in log
            assert processes_of(path) == {}
    assert ["starting decode-0" in serve.log.read_text() for serve in (first, second)] == [False, True]
