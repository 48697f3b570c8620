"""The exception tree, and the one table that maps it to gRPC and HTTP.

KVRelayError                      internal: our own fault
├── InvalidRequestError           what the client sent cannot be served; names the field
│   └── UnknownModelError
├── ConfigurationError            what the operator set cannot work; names the setting and the remedy
├── ModelLoadError                a checkpoint that cannot be run; names the tensor or the field
├── KVError                       a block could not be moved or trusted
├── CancelledByPeerError          the client or the router gave the request up
├── DeadlineError                 a phase took longer than it may
├── OverloadedError               queues are full; try again later
└── UnavailableError              no node can serve now
"""

from dataclasses import dataclass

import grpc


class KVRelayError(Exception):
    """Base of everything kvrelay raises on purpose. Its own meaning: a failure inside the cluster."""


class InvalidRequestError(KVRelayError):
    """The client's request cannot be served as it is.

    `field` is the name the client used for the offending field, or None when the request as a whole is wrong.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownModelError(InvalidRequestError):
    """No model of that name is served here."""


class ConfigurationError(KVRelayError):
    """A setting that cannot work; the message names it and what to do."""


class ModelLoadError(KVRelayError):
    """A checkpoint that cannot be run; the message names the tensor or the configuration field."""


class KVError(KVRelayError):
    """A block could not be moved, or did not pass verification."""


class CancelledByPeerError(KVRelayError):
    """The other side gave the request up."""


class DeadlineError(KVRelayError):
    """A phase of a request took longer than it may."""


class OverloadedError(KVRelayError):
    """Queues are full."""


class UnavailableError(KVRelayError):
    """No node can serve this now."""


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """How an error looks from outside. `openai_type` is the `type` field of an OpenAI error body."""

    grpc_code: grpc.StatusCode
    http_status: int
    openai_type: str


_STATUS: dict[type[BaseException], ErrorStatus] = {
    UnknownModelError: ErrorStatus(grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error"),
    InvalidRequestError: ErrorStatus(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    CancelledByPeerError: ErrorStatus(grpc.StatusCode.CANCELLED, 499, "request_cancelled"),
    DeadlineError: ErrorStatus(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    OverloadedError: ErrorStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "overloaded_error"),
    UnavailableError: ErrorStatus(grpc.StatusCode.UNAVAILABLE, 503, "unavailable_error"),
    KVRelayError: ErrorStatus(grpc.StatusCode.INTERNAL, 500, "internal_error"),
}

_INTERNAL = _STATUS[KVRelayError]


def status_of(error: BaseException) -> ErrorStatus:
    """The status of the nearest ancestor in the table; anything that is not ours is internal."""
    for cls in type(error).__mro__:
        if cls in _STATUS:
            return _STATUS[cls]
    return _INTERNAL


def error_from_grpc(code: grpc.StatusCode, message: str) -> KVRelayError:
    """The error that a peer reported, as our own type again."""
    for cls, status in _STATUS.items():
        if status.grpc_code is code and cls is not UnknownModelError and issubclass(cls, KVRelayError):
            return cls(message)
    return KVRelayError(f"{code.name}: {message}")
