"""The other process of the self-test over device memory, with a substitute for the device. Argument: how it fails."""

import asyncio
import sys

from kv_connector.device.self_test import hold
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.layout import KVLayout
from tests.kv_connector.device.direct_device import DirectDevice


def scratch(layout: KVLayout, num_blocks: int) -> DirectDevice:
    return DirectDevice(num_blocks, layout.block_bytes)


def refusing(layout: KVLayout, num_blocks: int) -> DirectDevice:
    raise ConfigurationError("not on this device\nbecause of that")


if __name__ == "__main__":
    if sys.argv[1:] == ["hang"]:
        sys.stdin.read()
    elif sys.argv[1:] != ["end"]:
        asyncio.run(hold(refusing if sys.argv[1:] == ["refuse"] else scratch))
