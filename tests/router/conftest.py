"""The tokenizer that the tests of the edge share. It is built once and never changed."""

from pathlib import Path

import pytest

from kvrelay.text.tokenizer import Tokenizer
from tests.router.edge_parts import ScriptedRelay
from tests.text.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_directory: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_directory)


@pytest.fixture
def relay(tokenizer: Tokenizer) -> ScriptedRelay:
    return ScriptedRelay(tokenizer)
