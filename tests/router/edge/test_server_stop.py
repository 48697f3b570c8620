"""What clients see of an HTTP server that stops and waits for them no longer."""

import asyncio
import json

import pytest

from tests.router.edge.edge_parts import ScriptedRelay
from tests.router.edge.gateway_client import COMPLETION, serving

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"


async def test_no_client_that_still_sends_or_reads_is_a_failure(
    relay: ScriptedRelay, caplog: pytest.LogCaptureFixture
) -> None:
    relay.hang_at = 2
    body = json.dumps(COMPLETION | {"stream": True}).encode()
    async with serving(relay) as gateway:
        (sends, to_send), (reads, to_read) = [
            await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(2)
        ]
        to_send.write(HEAD % (len(body) + 1, body))
        to_read.write(HEAD % (len(body), body))
        await reads.readuntil(b"data: ")
    async with asyncio.timeout(10):
        answer = await sends.read()
        await reads.read()
    assert answer.startswith(b"HTTP/1.1 503") and b"the router is stopping" in answer
    assert relay.num_running == 0
    assert not [record for record in caplog.records if record.exc_info]
    to_send.close()
    to_read.close()
