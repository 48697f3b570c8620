"""How a node's KV leaves its card: the self-test with another process, and what follows from it."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kv_connector.device.memory import BlockCopy
from kv_connector.self_test import SelfTestReport
from kv_connector.settings import ConnectorSettings, SharedMemorySettings, UcxSettings
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv_layout import KVLayout
from kvrelay.node.device_transfer import DeviceTransfer, choose_direct
from kvrelay.node.transfer_probe import check_direct
from tests.kv_connector.backends import CLUSTER_SECRET
from tests.kv_connector.direct_device import DirectDevice
from tests.kv_connector.probe import scratch

PROBE = (sys.executable, "-m", "tests.kv_connector.probe")


def settings(directory: Path) -> ConnectorSettings:
    return ConnectorSettings(
        shared_memory=SharedMemorySettings(str(directory)), ucx=UcxSettings(CLUSTER_SECRET, net_devices="lo")
    )


def is_empty(directory: Path) -> bool:
    return not list(directory.iterdir())


class Lying(DirectDevice):
    """What the host is given is not what is there."""

    def to_host(self, copies: Sequence[BlockCopy]) -> None:
        super().to_host(copies)
        assert self._staging is not None
        self._staging[-1] ^= 1


def lying(layout: KVLayout, num_blocks: int) -> DirectDevice:
    return Lying(num_blocks, layout.block_bytes)


def unmappable(layout: KVLayout, num_blocks: int) -> DirectDevice:
    device = DirectDevice(num_blocks, layout.block_bytes)
    device.unmappable = True
    return device


@pytest.mark.parametrize("name", ["cuda_ipc", "ucx"])
async def test_passes_where_bytes_move_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    report = await check_direct(name, settings(tmp_path), scratch, probe=PROBE)
    assert not report.problem and report.bytes_per_second > 0
    assert is_empty(tmp_path)


async def test_finds_wrong_bytes_and_pools_that_can_not_be_mapped(tmp_path: Path) -> None:
    report = await check_direct("cuda_ipc", settings(tmp_path), lying, probe=PROBE)
    assert report.is_wrong and report.problem == "1 of 16 blocks arrived with other bytes"
    report = await check_direct("cuda_ipc", settings(tmp_path), unmappable, probe=PROBE)
    assert report.problem == "16 of 16 blocks did not arrive: failed"
    assert is_empty(tmp_path)


@pytest.mark.parametrize(("way", "problem"), [("end", "ended; what it logged"), ("hang", "not ready after 0.05 s")])
async def test_a_process_that_does_not_answer_is_a_problem(way: str, problem: str, tmp_path: Path) -> None:
    report = await check_direct(
        "cuda_ipc", settings(tmp_path), scratch, probe=(*PROBE, way), start_seconds=0.05 if way == "hang" else 60
    )
    assert problem in report.problem and not report.is_wrong


class SelfTests:
    """What each connector's self-test says; good unless stated."""

    def __init__(self, *bad: str) -> None:
        self.checked: list[str] = []
        self._bad = bad

    async def check(self, name: str) -> SelfTestReport:
        self.checked.append(name)
        return SelfTestReport("nothing arrived") if name in self._bad else SelfTestReport(bytes_per_second=1e9)

    async def choose(self, names: str, wish: DeviceTransfer = "auto", problem: str = "") -> str:
        return ",".join(await choose_direct(wish, names.split(","), self.check, problem=problem))


async def test_what_passes_serves_device_memory() -> None:
    assert await SelfTests().choose("shared_memory") == "cuda_ipc"
    assert await SelfTests().choose("shared_memory,ucx") == "cuda_ipc,ucx"
    assert await SelfTests().choose("ucx", "direct") == "ucx"


async def test_ucx_does_for_both_but_nothing_does_for_ucx() -> None:
    assert await SelfTests("cuda_ipc").choose("shared_memory,ucx") == "ucx"
    tests = SelfTests("ucx")
    assert await tests.choose("shared_memory,ucx") == "" and tests.checked == ["ucx"]
    assert await SelfTests("cuda_ipc").choose("shared_memory") == ""


async def test_staging_is_asked_for_or_unavoidable() -> None:
    tests = SelfTests()
    assert await tests.choose("shared_memory", "staged") == ""
    assert await tests.choose("ucx,redis") == ""
    assert await tests.choose("ucx", problem="no") == ""
    assert not tests.checked


@pytest.mark.parametrize(
    ("names", "bad", "problem", "why"),
    [
        ("shared_memory", "cuda_ipc", "", "cuda_ipc: nothing arrived"),
        ("ucx,redis", "", "", "redis takes blocks from host memory"),
        ("ucx", "", "not on this card", "not on this card"),
    ],
)
async def test_forced_and_impossible_ends_the_start(names: str, bad: str, problem: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=f"kv-device-transfer direct does not work here: {why}.*staged"):
        await SelfTests(bad).choose(names, "direct", problem)
