"""docs/api.md names the paths, parameters, fields and statuses of the HTTP interface, and no others."""

import json
import re

import pytest

from kvrelay.core import errors
from kvrelay.core.errors import KVRelayError, status_of
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.text.tokenizer import Tokenizer
from router.edge import gateway, openai_errors
from router.edge.grpc_service import MAX_ANSWER_BYTES
from router.edge.openai_schema import ChatBody, CompletionBody, TokenizeBody
from router.edge.unsupported_fields import UNSUPPORTED_FIELDS
from router.request import KVOrigins, RequestTrace
from router.settings import RouterSettings
from tests.pages import names, page, rows, section
from tests.router.edge.edge_parts import ScriptedRelay, make_edge

PAGE = page("api.md")
PARAMETERS = rows(section(PAGE, "### Parameters"))
ERRORS = [found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, KVRelayError)]
DEFAULTS: dict[str, object] = {"0": 0, "1": 1, "false": False, "true": True, "none": None, "drawn": None}


def test_paths(tokenizer: Tokenizer) -> None:
    app = gateway.create_app(make_edge(ScriptedRelay(tokenizer)), version="test", max_body_bytes=1)
    served = {re.sub(r"{.*}", "{id}", route.path) for route in app.router.routes}  # type: ignore[attr-defined]
    assert set(re.findall(r"(/[\w/{}]+)`", "".join(row[0] for row in rows(section(PAGE, "## HTTP"))))) == served


def test_parameters() -> None:
    fields = set(CompletionBody.model_fields), set(ChatBody.model_fields)
    assert {name for row in PARAMETERS for name in names(row[0])} == fields[0] | fields[1]
    for cell, *_ in PARAMETERS:
        for name in names(cell):
            of_completions, of_chat = (name in found for found in fields)
            assert of_completions or "chat" in cell, f"{name} is a field of chat alone"
            assert of_chat or "(completions)" in cell, f"{name} is a field of completions alone"


def test_defaults_of_sampling() -> None:
    for cell, default, _ in PARAMETERS:
        for name in {*names(cell)} & {*SamplingParams.__slots__} - {"max_tokens"}:  # which has two
            value = getattr(SamplingParams(), name)
            assert DEFAULTS[default] == (None if value == () else value), name


def test_refused_fields() -> None:
    table = rows(PAGE[PAGE.index("Refused, unless") : PAGE.index("Ignored, since")])
    assert {name for _, refused, _ in table for name in names(refused)} == set(UNSUPPORTED_FIELDS)
    [[what]] = [row[1:] for row in rows(section(PAGE, "## HTTP")) if "/tokenize" in row[0]]
    said = what[what.index("not its text") : what.index("are refused")]
    assert set(names(said)) == set(TokenizeBody.refused)


def test_largest_requests_and_answers() -> None:
    largest, words = RouterSettings.model_fields["max_body_bytes"].default, " ".join(PAGE.split())
    assert f"`--max-body-bytes`, {largest >> 20} MiB, which has room for a prompt of 131,072 tokens" in words
    assert len(json.dumps({"prompt": [999_999] * 131_072})) < largest
    together = gateway.BODIES_AT_A_TIME * largest >> 20
    assert f"{gateway.BODIES_AT_A_TIME} times `--max-body-bytes`, {together} MiB" in words
    assert f"{largest >> 20} MiB (`--max-body-bytes`), answers of `Generate` {MAX_ANSWER_BYTES >> 20} MiB" in words


def test_fields_of_a_trace() -> None:
    named = [name.removeprefix("kv.") for row in rows(section(PAGE, "### Answers")) for name in names(row[0])]
    assert sorted(named) == sorted((set(RequestTrace.__slots__) | set(KVOrigins.__slots__)) - {"kv"})


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_statuses_of_errors(error: type[KVRelayError]) -> None:
    said = openai_errors.error_body(error("it failed"))["error"]
    kinds = [row[:2] for row in rows(section(PAGE, "### Errors")) if f"`{said['code']}`" in row[2]]
    assert kinds == [[str(status_of(error("it failed")).http_status), f"`{said['type']}`"]]
