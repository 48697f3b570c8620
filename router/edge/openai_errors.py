"""Errors in OpenAI's form `{"error": {...}}`: as answers, as events of a stream, and for what is no request."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvrelay.core.errors import (
    RETRY_DELAY_SECONDS,
    ContextLengthError,
    DeadlineError,
    GivenUpError,
    InvalidRequestError,
    KVRelayError,
    UnknownModelError,
    status_of,
)
from router.edge.openai_format import Json

# OpenAI's own codes, by which clients recognise a wrong name, and a conversation that they have to shorten.
_OPENAI_CODES: dict[type[KVRelayError], str] = {
    ContextLengthError: "context_length_exceeded",
    UnknownModelError: "model_not_found",
}


def error_body(error: KVRelayError) -> Json:
    status = status_of(error)
    code = _OPENAI_CODES.get(type(error), status.grpc_code.name.lower())
    param = error.field if isinstance(error, InvalidRequestError) else None
    return {"error": {"message": str(error), "type": status.openai_type, "param": param, "code": code}}


def refusal_body(message: str) -> Json:
    """Returns the body for what HTTP itself does not allow: it is none of our errors, and has no code."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


async def answer_error(request: Request, error: Exception) -> Response:
    """Answers with an error of our own, an HTTPException (404, 405, 408, 413, 415), or any other exception, which the
    server logs afterwards."""
    if isinstance(error, KVRelayError):
        return _error_response(error)
    if isinstance(error, HTTPException):
        message = (
            f"{error.detail}: {request.method} {request.scope['path'][:100]}"
            if error.status_code in (404, 405)
            else error.detail
        )
        return JSONResponse(refusal_body(message), status_code=error.status_code, headers=error.headers)
    response = _error_response(KVRelayError("internal error"))
    response.headers["connection"] = "close"  # as the server does when it has logged it
    return response


def _error_response(error: KVRelayError) -> Response:
    status = status_of(error)
    headers = {"retry-after": str(RETRY_DELAY_SECONDS)} if status.may_retry else {}
    if status.http_status == 503:
        headers["connection"] = "close"  # so that the next try may reach another router
    if isinstance(error, DeadlineError | GivenUpError):
        headers["x-should-retry"] = "false"  # for OpenAI's clients, which would ask twice more
    return JSONResponse(error_body(error), status_code=status.http_status, headers=headers)
