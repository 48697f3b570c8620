"""Errors between processes.

Invariant: an error of our tree leaves a service as a status code, a message and rich details (google.rpc), and becomes
the same class again on the other side. It does so whether it ends a call or is part of a message.
"""

from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from kvrelay.core.errors import (
    RETRY_DELAY_SECONDS,
    CancelledByPeerError,
    ConfigurationError,
    ContextLengthError,
    DeadlineError,
    GivenUpError,
    InvalidRequestError,
    KVError,
    KVRelayError,
    ModelLoadError,
    NotFiniteError,
    NotTakenError,
    OverloadedError,
    UnavailableError,
    UnknownModelError,
    error_of_code,
    status_of,
)

ERROR_DOMAIN = "kvrelay"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_CHARS = 512

# ErrorInfo.reason on the wire: it names the error's class, which the status code alone does not always determine.
_REASONS: dict[str, type[KVRelayError]] = {
    "INTERNAL": KVRelayError,
    "INVALID_REQUEST": InvalidRequestError,
    "CONTEXT_LENGTH": ContextLengthError,
    "UNKNOWN_MODEL": UnknownModelError,
    "CONFIGURATION": ConfigurationError,
    "MODEL_LOAD": ModelLoadError,
    "KV": KVError,
    "NOT_FINITE": NotFiniteError,
    "CANCELLED": CancelledByPeerError,
    "DEADLINE": DeadlineError,
    "GIVEN_UP": GivenUpError,
    "OVERLOADED": OverloadedError,
    "UNAVAILABLE": UnavailableError,
    "NOT_TAKEN": NotTakenError,
}
_REASON_OF = {cls: reason for reason, cls in _REASONS.items()}
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode if code is not grpc.StatusCode.OK}


def rich_status(error: KVRelayError) -> Any:
    """Returns `error` as a google.rpc.Status, always with ErrorInfo, with BadRequest if a field is named, and with
    RetryInfo if trying again may help.

    The message is cut so that it fits HTTP/2 trailers in any script.
    """
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=_reason_of(error), domain=ERROR_DOMAIN)]
    message = str(error)[:MAX_MESSAGE_CHARS]
    if isinstance(error, InvalidRequestError) and error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_of(error)
    if status.may_retry:
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=RETRY_DELAY_SECONDS)))
    packed = [AnyMessage() for _ in details]
    for slot, detail in zip(packed, details, strict=True):
        slot.Pack(detail)
    return status_pb2.Status(code=status.grpc_code.value[0], message=message, details=packed)


def error_from_rpc(error: grpc.aio.AioRpcError) -> KVRelayError:
    """Returns the error that a peer or the transport has reported, as an exception of our own tree, with the field that
    it names."""
    encoded = next((value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY), None)
    status = _parsed(encoded) if isinstance(encoded, bytes) else status_pb2.Status()
    return _restored(error.code(), error.details() or error.code().name, status)


def error_from_status(encoded: bytes) -> KVRelayError:
    """Returns the error that a message reports as a serialized google.rpc.Status: that of `rich_status`."""
    status = _parsed(encoded)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return _restored(code, status.message or code.name, status)


def stranger(code: grpc.StatusCode, details: str, what: str) -> str:
    """Returns what gRPC's error tells of a program that answers where `what` should: the end of a sentence that begins
    with "what answers there". Returns "" if it tells nothing of the kind."""
    if code is grpc.StatusCode.UNAVAILABLE and "http1" in details:
        return "speaks HTTP"
    if code is grpc.StatusCode.UNAVAILABLE and "Failed parsing HTTP/2" in details:
        return "does not speak gRPC"
    if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
        return f"is no {what} ({details or code.name})"
    return ""


def _reason_of(error: KVRelayError) -> str:
    return next(_REASON_OF[cls] for cls in type(error).__mro__ if cls in _REASON_OF)


def _parsed(encoded: bytes) -> Any:
    """Returns a google.rpc.Status, without anything in it if it cannot be parsed."""
    try:
        return status_pb2.Status.FromString(encoded)
    except DecodeError:
        return status_pb2.Status()


def _restored(code: grpc.StatusCode, message: str, status: Any) -> KVRelayError:
    """Returns the error of the class that the details of `status` name or, if they name none, of that of `code`."""
    reason, field = _details_of(status)
    cls = _REASONS.get(reason)
    if cls is None:
        return error_of_code(code, message)
    if issubclass(cls, InvalidRequestError):
        return cls(message, field=field)
    return cls(message)


def _details_of(status: Any) -> tuple[str, str | None]:
    """Returns the reason ("" if the peer is not of kvrelay) and the field. Details that cannot be parsed are
    ignored."""
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    try:
        for detail in status.details:
            detail.Unpack(info)
            detail.Unpack(bad_request)
    except DecodeError:
        return "", None
    field = bad_request.field_violations[0].field if bad_request.field_violations else None
    return (info.reason if info.domain == ERROR_DOMAIN else ""), field
