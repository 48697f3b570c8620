"""A process that holds blocks in device memory: prints its endpoint and waits for the end of its standard input."""

import asyncio
import sys

from tests.kv_connector.backends import EPOCH, LAYOUT, DirectHarness, DirectNode, blocks, write_and_publish


async def main(names: str, directory: str) -> None:
    node = DirectNode(DirectHarness(names, directory).connector(), "child/0", 16, LAYOUT, EPOCH)
    await write_and_publish(node, blocks(16))
    sys.stdout.write(node.connector.endpoint + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await node.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
