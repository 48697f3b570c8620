"""A process that owns a shared-memory pool: publishes blocks, prints that it has, and waits for the end of its
standard input."""

import asyncio
import sys

from kv_connector.segments.shared_memory import SharedMemoryConnector
from kv_connector.settings import SharedMemorySettings
from tests.kv_connector.backends import EPOCH, LAYOUT, Node, blocks, write_and_publish


async def main(directory: str) -> None:
    connector = SharedMemoryConnector(SharedMemorySettings(directory))
    node = Node(connector, "child/0", 16, LAYOUT, EPOCH)
    await write_and_publish(node, blocks(16))
    sys.stdout.write(connector.endpoint + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await connector.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
