"""Chooses how a node moves KV that is in GPU memory: from device to device, or staged through the host.

Invariants: only a connector that has moved the right bytes between two processes serves device memory directly. A node
does not stage because a self-test has not come to its end: a pool that peers map on the GPU and one that they map in
host memory have no connector in common, so routers would refuse the node for as long as it lives.
"""

import logging
from collections.abc import Sequence

from kv_connector.registry import direct_name
from kvrelay.core.errors import ConfigurationError
from kvrelay.node.transfers.connector_choice import CheckConnector

_logger = logging.getLogger(__name__)


async def choose_direct(
    names: Sequence[str], check: CheckConnector, *, required: bool, problem: str
) -> tuple[str, ...]:
    """Returns the connectors over device memory (names for `registry.create_direct`) that replace the backends `names`;
    none when no direct transfer works. Raises ConfigurationError if it is `required` then, and where the test of one
    that has to pass did not come to an end. `check` tests one connector. `problem`: why none can work, if that is known
    in advance; otherwise empty."""
    found, lacking = ((), problem) if problem else await _working(names, check)
    if lacking and required:
        raise ConfigurationError(
            f"--kv-device-transfer direct does not work here: {lacking}; auto or staged moves KV through host memory"
        )
    if lacking:
        _logger.info("KV on the device moves through host memory: %s", lacking)
        return ()
    _logger.info("KV moves from device to device: %s", ",".join(found))
    return found


async def _working(names: Sequence[str], check: CheckConnector) -> tuple[tuple[str, ...], str]:
    """Returns the connectors that passed, in the order of asking, or none and why. The last one, which reaches every
    holder that the others reach, has to pass: without UCX, where that was chosen, none is used."""
    direct: list[str] = []
    for name in names:
        found = direct_name(name)
        if found is None:
            return (), f"{name} takes blocks from host memory"
        direct.append(found)
    passed: list[str] = []
    lacking = ""
    for name in reversed(direct):  # the one that has to pass first
        report = await check(name)
        if not report.problem:
            _logger.info("%s over device memory: self-test passed, %.2f GB/s", name, report.bytes_per_second / 1e9)
            passed.insert(0, name)
            continue
        if report.is_unfinished and name == direct[-1]:
            raise ConfigurationError(
                f"{name} over device memory could not be tried: {report.problem}; start again, or set "
                "--kv-device-transfer staged for all nodes"
            )
        _logger.warning("%s over device memory: self-test failed: %s", name, report.problem)
        lacking = f"{name}: {report.problem}"
        if name == direct[-1]:
            break
    return (tuple(passed), "") if direct[-1] in passed else ((), lacking)
