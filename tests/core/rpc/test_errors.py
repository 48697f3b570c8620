"""Errors as parts of messages: the same as those that end a call."""

import pytest
from google.rpc import status_pb2  # type: ignore[import-untyped]

from kvrelay.core.errors import InvalidRequestError, KVRelayError, OverloadedError
from kvrelay.core.rpc.errors import error_from_status, rich_status
from tests.core.all_errors import ALL_ERRORS


def restored(error: KVRelayError) -> KVRelayError:
    return error_from_status(rich_status(error).SerializeToString())


@pytest.mark.parametrize("cls", ALL_ERRORS)
def test_every_error_comes_back_as_itself(cls: type[KVRelayError]) -> None:
    assert repr(restored(cls("what happened"))) == repr(cls("what happened"))


def test_the_field_that_is_wrong_comes_with_it() -> None:
    found = restored(InvalidRequestError("no", field="n"))
    assert isinstance(found, InvalidRequestError) and found.field == "n"


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        (status_pb2.Status(code=8, message="full").SerializeToString(), OverloadedError("full")),
        (status_pb2.Status(code=77, message="a new code").SerializeToString(), KVRelayError("UNKNOWN: a new code")),
        (b"", KVRelayError("UNKNOWN: UNKNOWN")),
        (b"\xff\xff", KVRelayError("UNKNOWN: UNKNOWN")),
    ],
    ids=["without details", "of a newer protocol", "empty", "garbled"],
)
def test_what_names_no_class_of_ours_is_of_its_code(encoded: bytes, expected: KVRelayError) -> None:
    assert repr(error_from_status(encoded)) == repr(expected)
