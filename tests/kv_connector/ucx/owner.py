"""A process that holds blocks for UCX readers: prints its endpoint and waits for the end of its standard input."""

import asyncio
import sys

from kv_connector.settings import UcxSettings
from kv_connector.ucx.connector import UcxConnector
from kvrelay.core.kv.layout import KVLayout
from tests.kv_connector.backends import CLUSTER_SECRET, EPOCH, Node, blocks, write_and_publish

# A block is larger than what several of one Ask may have together.
LARGE_LAYOUT = KVLayout(num_kv_heads=8, num_layers=40, block_size=16, head_dim=128, dtype="float32")  # 5 MiB a block
NUM_BLOCKS = 24


async def main() -> None:
    connector = UcxConnector(UcxSettings(CLUSTER_SECRET))
    node = Node(connector, "child/0", NUM_BLOCKS, LARGE_LAYOUT, EPOCH)
    await write_and_publish(node, blocks(NUM_BLOCKS))
    sys.stdout.write(connector.endpoint + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await connector.close()


if __name__ == "__main__":
    asyncio.run(main())
