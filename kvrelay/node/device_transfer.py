"""How a node whose KV lies on a card moves it: from device to device, or staged through the host; and why.

Invariant: nothing serves device memory directly that has not brought the right bytes from another process before.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from kv_connector.registry import direct_name
from kv_connector.self_test import SelfTestReport
from kvrelay.core.errors import ConfigurationError

DeviceTransfer = Literal["auto", "direct", "staged"]

_logger = logging.getLogger(__name__)


async def choose_direct(
    wish: DeviceTransfer, names: Sequence[str], check: Callable[[str], Awaitable[SelfTestReport]], *, problem: str = ""
) -> tuple[str, ...]:
    """The connectors over device memory (`registry.create_direct`) that do for it what those called `names` do for the
    host's; none: it is staged through the host, under `names`. `check` tests one of them, `problem` says beforehand
    why none can work. Raises ConfigurationError when `wish` is "direct" and that cannot be had."""
    if wish == "staged":
        return ()
    found, lacking = ((), problem) if problem else await _working(names, check)
    if lacking and wish == "direct":
        raise ConfigurationError(
            f"--kv-device-transfer direct does not work here: {lacking}; auto or staged moves KV through host memory"
        )
    if lacking:
        _logger.info("KV on the device moves through host memory: %s", lacking)
        return ()
    _logger.info("KV moves from device to device: %s", ",".join(found))
    return found


async def _working(
    names: Sequence[str], check: Callable[[str], Awaitable[SelfTestReport]]
) -> tuple[tuple[str, ...], str]:
    """In the order of asking; or why not. Whatever maps memory of this host is of use, but what UCX reaches it does
    not: without UCX, where that was chosen, none."""
    direct: list[str] = []
    for name in names:
        found = direct_name(name)
        if found is None:
            return (), f"{name} takes blocks from host memory"
        direct.append(found)
    passed: list[str] = []
    lacking = ""
    for name in reversed(direct):  # what others depend on first
        report = await check(name)
        if not report.problem:
            _logger.info("%s over device memory: self-test passed, %.2f GB/s", name, report.bytes_per_second / 1e9)
            passed.insert(0, name)
            continue
        _logger.warning("%s over device memory: self-test failed: %s", name, report.problem)
        lacking = f"{name}: {report.problem}"
        if name == direct[-1]:
            break
    return (tuple(passed), "") if direct[-1] in passed else ((), lacking)
