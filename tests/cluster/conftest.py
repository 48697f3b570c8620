"""The model that clusters serve, unless a test needs one of another family."""

from pathlib import Path

import pytest

from tests.cluster.prompts import VOCAB_SIZE
from tests.engine.reference import Reference
from tests.engine.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("llama"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(model)
