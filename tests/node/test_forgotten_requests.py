"""What an aborted request leaves in a node: nothing, not even until a collection of garbage. Its prompt may be long."""

import asyncio
import gc
import weakref

from decode_node.service import DecodeService
from kvrelay.v1 import decode_node_pb2 as pb
from tests.node.fake_node import make_node, serving
from tests.node.router_end import PATIENCE, Router, admit


async def test_a_request_that_was_aborted_while_it_received_is_forgotten() -> None:
    """No collection of garbage is needed for that: full ones are rare."""
    gc.collect()
    gc.disable()
    try:
        async with serving(DecodeService, node := make_node()) as service:
            router = Router(service)
            router.send(admit("a"))
            assert (await router.event()).HasField("admitted")
            await asyncio.sleep(0)  # the reception waits for its blocks
            receiver = service._active["a"].receiver
            assert receiver is not None
            forgotten = weakref.ref(receiver)
            del receiver
            router.send(pb.DecodeCommand(abort=pb.Abort(request_id="a")))
            async with asyncio.timeout(PATIENCE):
                while forgotten() is not None:
                    await asyncio.sleep(0.001)
            await node.check_idle()
            await router.close()
    finally:
        gc.enable()
