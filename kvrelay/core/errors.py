"""The exception tree, and the one table that maps it to gRPC and HTTP.

KVRelayError                      internal: a failure inside the cluster
├── InvalidRequestError           the client's request cannot be served; names the field
│   ├── ContextLengthError
│   └── UnknownModelError
├── ConfigurationError            a setting cannot work; names the setting and the remedy
├── ModelLoadError                a checkpoint cannot be run; names the tensor or the field
├── KVError                       a block could not be moved or trusted
├── NotFiniteError                the model's logits are not finite, perhaps because the KV they rest on is not
├── CancelledByPeerError          the client or the router has cancelled the request
├── DeadlineError                 a phase took longer than it may
├── GivenUpError                  a request has lost too many nodes; it may be what ends them
├── OverloadedError               queues are full; trying again later may help
└── UnavailableError              no node can serve now
    └── NotTakenError             a node has not taken a request, which has no part in how it fares
"""

from dataclasses import dataclass

import grpc


class KVRelayError(Exception):
    """The base of all errors that kvrelay raises on purpose. Raised itself, it means a failure inside the cluster."""


class InvalidRequestError(KVRelayError):
    """The client's request cannot be served as it is.

    `field` is the client's name for the field that is wrong, or None if the request as a whole is wrong.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(InvalidRequestError):
    """Prompt and output together are longer than the model allows."""


class UnknownModelError(InvalidRequestError):
    """No model of that name is served here."""


class ConfigurationError(KVRelayError):
    """A setting cannot work. The message names it and says what to do."""


class ModelLoadError(KVRelayError):
    """A checkpoint cannot be run. The message names the tensor or the configuration field."""


class KVError(KVRelayError):
    """A block could not be moved, or did not pass verification."""


class NotFiniteError(KVRelayError):
    """The model returned logits that are not finite. The KV of the request may be why, wherever it is by now."""


class CancelledByPeerError(KVRelayError):
    """The other side has cancelled the request."""


class DeadlineError(KVRelayError):
    """A phase of a request took longer than it may."""


class GivenUpError(KVRelayError):
    """Too many nodes have ended under a request, which may be why. It should not be sent again."""


class OverloadedError(KVRelayError):
    """Queues are full."""


class UnavailableError(KVRelayError):
    """No node can serve this now."""


class NotTakenError(UnavailableError):
    """A node has not taken a request, and did nothing for it. Whatever ends the node, this request does not."""


RETRY_DELAY_SECONDS = 1


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """How an error is reported to others. `openai_type` is the `type` field of an OpenAI error body. `may_retry`: the
    same request may be sent again after `RETRY_DELAY_SECONDS`."""

    grpc_code: grpc.StatusCode
    http_status: int
    openai_type: str
    may_retry: bool = False


_STATUS: dict[type[KVRelayError], ErrorStatus] = {
    UnknownModelError: ErrorStatus(grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error"),
    InvalidRequestError: ErrorStatus(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    CancelledByPeerError: ErrorStatus(grpc.StatusCode.CANCELLED, 499, "request_cancelled"),
    DeadlineError: ErrorStatus(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    OverloadedError: ErrorStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "overloaded_error", may_retry=True),
    UnavailableError: ErrorStatus(grpc.StatusCode.UNAVAILABLE, 503, "unavailable_error", may_retry=True),
    KVRelayError: ErrorStatus(grpc.StatusCode.INTERNAL, 500, "internal_error"),
}
REPORTED_CODES = tuple(status.grpc_code for status in _STATUS.values())


def status_of(error: BaseException) -> ErrorStatus:
    """Returns the status of the error's nearest ancestor in the table; an exception that is not ours is internal."""
    for cls in type(error).__mro__:
        if cls in _STATUS:
            return _STATUS[cls]
    return _STATUS[KVRelayError]


def error_of_code(code: grpc.StatusCode, message: str) -> KVRelayError:
    """Returns the error that a peer has reported, as an exception of our own tree."""
    for cls, status in _STATUS.items():
        if status.grpc_code is code and cls is not UnknownModelError:
            return cls(message)
    return KVRelayError(f"{code.name}: {message}")
