"""docs/metrics.md names what a router serves at `/metrics`, and nothing else."""

import asyncio
import re
from pathlib import Path

import httpx

from router.app import serve
from router.settings import RouterSettings
from tests.router.scripted_nodes import PATIENCE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


async def test_the_page_names_every_family_and_no_other(tokenizer_directory: Path) -> None:
    """A family is served from the start, before it has a sample."""
    settings = RouterSettings(
        model=str(tokenizer_directory), decode_nodes=("127.0.0.1:1",), port=0, grpc_port=0, start_timeout=0.0
    )
    async with serve(settings, asyncio.Event(), asyncio.Event()) as addresses:
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
            scraped = (await client.get(f"http://{addresses.http}/metrics")).text
    families = set(re.findall(r"^# TYPE (\S+)", scraped, re.MULTILINE))
    named = set(re.findall(r"kvrelay:\w+", PAGE.read_text(encoding="utf-8")))
    assert named == {name for name in families if not name.endswith("_created")}
