"""How a node moves KV that is on its GPU: the choice between direct and staged, given what the self-tests report."""

import pytest

from kv_connector.self_test import SelfTestReport
from kvrelay.core.errors import ConfigurationError
from kvrelay.node.transfers.device_transfer import choose_direct

SILENT = SelfTestReport("nothing arrived")


class SelfTests:
    """The reports of the connectors' self-tests: good, except for those named, of which `bad` is the report."""

    def __init__(self, *names: str, bad: SelfTestReport = SILENT) -> None:
        self.checked: list[str] = []
        self._bad = dict.fromkeys(names, bad)

    async def check(self, name: str) -> SelfTestReport:
        self.checked.append(name)
        return self._bad.get(name, SelfTestReport(bytes_per_second=1e9))

    async def choose(self, names: str, *, required: bool = False, problem: str = "") -> str:
        return ",".join(await choose_direct(names.split(","), self.check, required=required, problem=problem))


async def test_connectors_that_pass_serve_device_memory() -> None:
    assert await SelfTests().choose("shared_memory") == "cuda_ipc"
    assert await SelfTests().choose("shared_memory,ucx") == "cuda_ipc,ucx"
    assert await SelfTests().choose("ucx", required=True) == "ucx"


async def test_ucx_serves_alone_but_nothing_serves_without_a_chosen_ucx() -> None:
    assert await SelfTests("cuda_ipc").choose("shared_memory,ucx") == "ucx"
    tests = SelfTests("ucx")
    assert await tests.choose("shared_memory,ucx") == "" and tests.checked == ["ucx"]
    assert await SelfTests("cuda_ipc").choose("shared_memory") == ""


@pytest.mark.parametrize("required", [False, True])
async def test_a_self_test_without_an_end_ends_the_start_rather_than_staging(required: bool) -> None:
    """Peers whose test did come to an end map each other's pools on the GPU, and this one could map none of them."""
    unfinished = SelfTestReport("not ready after 60 s", is_unfinished=True)
    for name, names in (("cuda_ipc", "shared_memory"), ("ucx", "shared_memory,ucx")):
        tests = SelfTests(name, bad=unfinished)
        with pytest.raises(ConfigurationError, match=f"^{name} .* could not be tried: not ready after 60 s; .*staged"):
            await tests.choose(names, required=required)
    assert await SelfTests("cuda_ipc", bad=unfinished).choose("shared_memory,ucx") == "ucx", "which all have in common"


async def test_staging_is_chosen_without_a_test_when_it_is_unavoidable() -> None:
    tests = SelfTests()
    assert await tests.choose("ucx,redis") == ""
    assert await tests.choose("ucx", problem="no") == ""
    assert not tests.checked


@pytest.mark.parametrize(
    ("names", "bad", "problem", "why"),
    [
        ("shared_memory", "cuda_ipc", "", "cuda_ipc: nothing arrived"),
        ("ucx,redis", "", "", "redis takes blocks from host memory"),
        ("ucx", "", "not on this GPU", "not on this GPU"),
    ],
)
async def test_direct_transfer_that_is_set_and_impossible_ends_the_start(
    names: str, bad: str, problem: str, why: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"kv-device-transfer direct does not work here: {why}.*staged"):
        await SelfTests(bad).choose(names, required=True, problem=problem)
