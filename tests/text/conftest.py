"""The tokenizer of these tests. It is built once and never changed."""

import pytest

from kvrelay.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))
