"""A whole router over a scripted node, in the test's process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from router.app import serve
from router.settings import RouterSettings
from tests.router.scripted_nodes import PATIENCE, ScriptedDecode

BODY = {"prompt": [1, 2], "max_tokens": 1}


@dataclass(frozen=True, slots=True)
class Served:
    """A router and its decode node. `router.aclose` stops the router as a signal does, `hurry.set` as a second one."""

    decode: ScriptedDecode
    http: httpx.AsyncClient
    grpc_address: str
    router: AsyncExitStack
    hurry: asyncio.Event

    async def post(self) -> httpx.Response:
        return await self.http.post("/v1/completions", json=BODY)


@asynccontextmanager
async def served(model: Path, **settings: Any) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        decode = ScriptedDecode()
        decode.max_model_len = 10_000_000  # for long answers
        await decode.start()
        stack.push_async_callback(decode.stop)
        options = RouterSettings(
            model=str(model), decode_nodes=(decode.address,), port=0, grpc_port=0, start_timeout=PATIENCE, **settings
        )
        hurry = asyncio.Event()
        router = await stack.enter_async_context(AsyncExitStack())
        stack.callback(hurry.set)
        addresses = await router.enter_async_context(serve(options, asyncio.Event(), hurry))
        base_url = f"http://{addresses.http}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=PATIENCE))
        yield Served(decode, http, addresses.grpc, router, hurry)
