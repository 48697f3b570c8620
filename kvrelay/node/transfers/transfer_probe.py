"""`python -m kvrelay.node.transfers.transfer_probe`: the other process of the self-test over device memory, on a GPU.

`kv_connector/device/self_test.py` says what it does and starts it.
"""

import asyncio
import sys

from kv_connector.device.self_test import hold

TRANSFER_PROBE = (sys.executable, "-m", "kvrelay.node.transfers.transfer_probe")

if __name__ == "__main__":
    from kvrelay.node.transfers.cuda_pool import cuda_scratch

    asyncio.run(hold(cuda_scratch))
