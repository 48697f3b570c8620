"""What the tests of the edge share: a tokenizer, which never changes, and a gateway for each file."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvrelay.text.tokenizer import Tokenizer
from tests.router.edge.edge_parts import ScriptedRelay
from tests.router.edge.gateway_client import Gateway, serving
from tests.text.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> Tokenizer:
    return Tokenizer.load(str(tokenizer_directory))


@pytest.fixture
def relay(tokenizer: Tokenizer) -> ScriptedRelay:
    return ScriptedRelay(tokenizer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway(tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    async with serving(ScriptedRelay(tokenizer)) as gateway:
        yield gateway


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Gateway:
    shared_gateway.relay.reset()
    return shared_gateway
