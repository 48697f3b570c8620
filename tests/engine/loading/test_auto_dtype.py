"""The dtype `auto` is what config.json says. Where that takes more memory than what is stored, the log says so."""

import json
import logging
from pathlib import Path

import pytest
import torch

from tests.engine.load_on_cpu import load
from tests.engine.tiny_models import make_tiny_model

_WIDER = "config.json asks for float32, which takes twice the memory of the stored bfloat16: dtype bfloat16 takes"
_HALF = "a float16 checkpoint runs in float32 on a CPU"


@pytest.mark.parametrize(
    ("stored", "said", "computed", "logged"),
    [
        (torch.bfloat16, "float32", torch.float32, _WIDER),
        (torch.float16, "float32", torch.float32, _HALF),
        (torch.float16, None, torch.float32, _HALF),
        (torch.float16, "bfloat16", torch.bfloat16, None),
        (torch.bfloat16, None, torch.bfloat16, None),
        (torch.float32, "float32", torch.float32, None),
        (torch.float32, "bfloat16", torch.bfloat16, None),
    ],
)
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_a_configuration_that_asks_for_more_than_is_stored_is_mentioned(
    field: str,
    stored: torch.dtype,
    said: str | None,
    computed: torch.dtype,
    logged: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_tiny_model("llama-tied", tmp_path, dtype=stored)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "dtype": None, field: said}))
    with caplog.at_level(logging.INFO):
        assert load(tmp_path, dtype="auto").dtype is computed
    assert [logged in message for message in caplog.messages] == [True] if logged else not caplog.messages
    caplog.clear()
    with caplog.at_level(logging.INFO):
        load(tmp_path, dtype="float32")
    assert not caplog.messages, "whoever asked for it knows"
