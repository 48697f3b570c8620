"""The start-up self-tests over device memory: copies through the host, and connectors between two processes."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kv_connector.base import PoolBuffer
from kv_connector.device.memory import BlockCopy
from kv_connector.device.self_test import check_device, check_direct
from kv_connector.settings import ConnectorSettings, SharedMemorySettings, UcxSettings
from kvrelay.core.kv.layout import KVLayout
from tests.kv_connector.backends import CLUSTER_SECRET, LAYOUT
from tests.kv_connector.device.direct_device import DirectDevice
from tests.kv_connector.device.slow_device import SlowDevice
from tests.kv_connector.probe import scratch

PROBE = (sys.executable, "-m", "tests.kv_connector.probe")


def settings(directory: Path) -> ConnectorSettings:
    return ConnectorSettings(
        shared_memory=SharedMemorySettings(str(directory)), ucx=UcxSettings(CLUSTER_SECRET, net_devices="lo")
    )


def is_empty(directory: Path) -> bool:
    return not list(directory.iterdir())


class Lying(DirectDevice):
    """A device whose copies to the host have a wrong bit."""

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
async def test_a_connector_that_moves_bytes_passes_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    report = await check_direct(name, settings(tmp_path), scratch, probe=PROBE)
    assert not report.problem and report.bytes_per_second > 0
    assert is_empty(tmp_path)


async def test_wrong_bytes_and_pools_that_can_not_be_mapped_are_reported(tmp_path: Path) -> None:
    report = await check_direct("cuda_ipc", settings(tmp_path), lying, probe=PROBE)
    assert report.is_wrong and report.problem == "1 of 16 blocks arrived with other bytes"
    report = await check_direct("cuda_ipc", settings(tmp_path), unmappable, probe=PROBE)
    assert report.problem == "16 of 16 blocks did not arrive: failed"
    assert is_empty(tmp_path)


async def test_a_device_that_another_process_has_to_itself_is_reported(tmp_path: Path) -> None:
    """The other process holds its blocks before this one touches the device."""

    def occupied(layout: KVLayout, num_blocks: int) -> DirectDevice:
        raise RuntimeError("CUDA error: devices are busy or unavailable\nFor debugging consider ...")

    report = await check_direct("cuda_ipc", settings(tmp_path), occupied, probe=PROBE)
    assert report.problem == "CUDA error: devices are busy or unavailable" and not report.is_unfinished
    assert is_empty(tmp_path)


@pytest.mark.parametrize(("way", "problem"), [("end", "ended; what it logged"), ("hang", "not ready after 0.05 s")])
async def test_a_process_that_does_not_answer_is_reported(way: str, problem: str, tmp_path: Path) -> None:
    report = await check_direct(
        "cuda_ipc", settings(tmp_path), scratch, probe=(*PROBE, way), start_seconds=0.05 if way == "hang" else 60
    )
    assert problem in report.problem and report.is_unfinished and not report.is_wrong


async def test_what_the_other_process_can_not_do_is_reported(tmp_path: Path) -> None:
    """The next start would find the same, unlike where it has said nothing."""
    report = await check_direct("cuda_ipc", settings(tmp_path), scratch, probe=(*PROBE, "refuse"))
    assert (report.problem, report.is_unfinished) == ("not on this device", False)
    assert is_empty(tmp_path)


class Shifting(SlowDevice):
    """A device that copies one block to the place of another."""

    def to_host(self, copies: Sequence[BlockCopy]) -> None:
        first, *rest = copies
        super().to_host([BlockCopy(rest[0].block_id, first.slot), *rest])


def staging_of(num_blocks: int) -> PoolBuffer:
    return PoolBuffer(memoryview(bytearray(num_blocks * LAYOUT.block_bytes)), LAYOUT, num_blocks)


def test_a_device_gets_back_what_it_was_given() -> None:
    for num_blocks, slots in ((64, 64), (2, 64), (64, 8)):
        device, staging = SlowDevice(num_blocks, LAYOUT.block_bytes), staging_of(slots)
        device.attach(staging)
        report = check_device(device, staging)
        assert not report.problem and report.bytes_per_second > 0
        assert not any(device.memory) and not any(staging.memory)


def test_a_device_that_mixes_up_blocks_or_fails_is_found() -> None:
    shifting, staging = Shifting(64, LAYOUT.block_bytes), staging_of(64)
    shifting.attach(staging)
    report = check_device(shifting, staging)
    assert report.is_wrong and report.problem.startswith("1 of 4 blocks")
    broken, staging = SlowDevice(64, LAYOUT.block_bytes), staging_of(64)
    broken.attach(staging)
    broken.broken = True
    assert check_device(broken, staging).problem == "the device is gone"
