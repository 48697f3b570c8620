"""Errors and their statuses: every error has one, and an error that a peer reports keeps its class."""

import inspect
import re

import grpc
import pytest

from kvrelay.core import errors
from kvrelay.core.errors import KVRelayError, error_of_code, status_of
from tests.core.all_errors import ALL_ERRORS


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: dict[str, int] = {}  # name -> depth
    for line in inspect.cleandoc(errors.__doc__ or "").splitlines():
        if match := re.match(r"([│├└─\s]*)(\w+Error)\b", line):
            drawn[match[2]] = len(match[1]) // 4
    assert drawn == {cls.__name__: len(cls.__mro__) - len(KVRelayError.__mro__) for cls in ALL_ERRORS}


@pytest.mark.parametrize("cls", ALL_ERRORS)
def test_client_faults_are_4xx_and_ours_are_5xx(cls: type[KVRelayError]) -> None:
    status = status_of(cls("message"))
    client_faults = (errors.InvalidRequestError, errors.CancelledByPeerError, errors.OverloadedError)
    assert (400 <= status.http_status < 500) == issubclass(cls, client_faults)
    assert (status.grpc_code is grpc.StatusCode.INTERNAL) == (status.http_status == 500)


def test_status_is_that_of_the_nearest_ancestor() -> None:
    class TooLongError(errors.InvalidRequestError):
        """An error that a later module might add."""

    assert status_of(TooLongError("x")) == status_of(errors.InvalidRequestError("x"))
    assert status_of(errors.UnknownModelError("x")).http_status == 404


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), MemoryError()])
def test_an_exception_that_is_not_ours_is_internal(error: BaseException) -> None:
    assert status_of(error) == status_of(KVRelayError("x"))


@pytest.mark.parametrize(
    "cls",
    [
        errors.InvalidRequestError,
        errors.CancelledByPeerError,
        errors.DeadlineError,
        errors.OverloadedError,
        errors.UnavailableError,
    ],
)
def test_every_error_keeps_its_class_over_its_grpc_code(cls: type[KVRelayError]) -> None:
    error = error_of_code(status_of(cls("x")).grpc_code, "what happened")
    assert type(error) is cls
    assert str(error) == "what happened"


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_every_grpc_code_becomes_an_error_of_ours(code: grpc.StatusCode) -> None:
    error = error_of_code(code, "what happened")
    assert isinstance(error, KVRelayError)
    assert "what happened" in str(error)


def test_only_a_peer_of_ours_knows_models() -> None:
    assert type(error_of_code(grpc.StatusCode.NOT_FOUND, "no such method")) is KVRelayError
