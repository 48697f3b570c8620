"""`kvrelay serve` with real nodes and a real router answers the commands that ask it, and leaves nothing behind. Other
ways to end are in `tests/e2e/test_life_and_death.py`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.local_cluster import local_cluster
from bench.random_model import write_random_model
from kvrelay.bench.command import bench
from kvrelay.cli import client
from kvrelay.core.errors import UnavailableError
from tests.e2e.processes import processes_of

SMALL = ("--num-blocks", "64", "--log-level", "warning", "--served-model-name", "tiny-random")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model whose path is in the arguments of every process of the cluster, and of no other process."""
    return write_random_model(tmp_path_factory.mktemp("cluster") / "tiny-random", "tiny")


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[Path]:
    """Yields the directory in which the nodes map their pools, empty again afterwards."""
    directory = tmp_path / "segments"
    directory.mkdir()
    yield directory
    assert list(directory.iterdir()) == []


def test_cluster_serves_and_ends(model: Path, segments: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with local_cluster(str(model), (*SMALL, "--shared-memory-dir", str(segments))) as address:
        assert list(segments.iterdir())
        assert os.getsid(address.process) == address.process, "a terminal's Ctrl-C reaches only us"
        assert len(processes_of(model)) == 4, "serve, two nodes, a router"
        assert address.model == "tiny-random"
        assert client.status(["--url", address.grpc]) == 0
        assert client.complete(["Hello", "--url", address.grpc, "--max-tokens", "4", "--stats"]) == 0
        load = ["--requests", "2", "--input-len", "20-40", "--output-len", "3", "--tokenizer", str(model)]
        for url in (f"http://{address.http}", f"grpc://{address.grpc}"):
            assert bench(["throughput", "--url", url, *load]) == 0
    assert not processes_of(model)
    captured = capfd.readouterr()
    assert "tiny-random  up to" in captured.out
    assert "4 tokens, the first after" in captured.err
    assert captured.out.count("2 requests completed, 0 failed") == 2
    assert "Traceback" not in captured.err


def test_a_cluster_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    model = tmp_path / "slow-model"
    with (
        pytest.raises(UnavailableError, match=r"the cluster was not ready after 0\.01 seconds"),
        local_cluster(str(model), start_timeout=0.01),
    ):
        pass
    assert not processes_of(model)


def test_a_cluster_whose_weights_are_missing_says_why_it_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weightless = tmp_path / "model"
    weightless.mkdir()
    (weightless / "config.json").write_text('{"model_type": "llama"}')
    (weightless / "tokenizer.json").write_text("{}")
    with pytest.raises(UnavailableError, match="ended before it was ready"), local_cluster(str(weightless)):
        pass
    errors = capfd.readouterr().err
    assert f"{weightless} has neither model.safetensors nor" in errors
    assert "exit code 1 before the cluster was ready. Its last lines:" in errors
    assert "Traceback" not in errors
    assert not processes_of(weightless)
