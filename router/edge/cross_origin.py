"""Which web pages' scripts may call from a browser (https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

from router.edge.openai_errors import refusal_body


def cross_origin(allowed: Sequence[str]) -> list[Middleware]:
    """Returns what tells browsers that pages from these origins may call; `*` is any. Nothing if there are none."""
    if not allowed:
        return []
    return [
        Middleware(
            _CrossOrigin,
            allow_origins=allowed,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after", "x-should-retry"],
        )
    ]


class _CrossOrigin(CORSMiddleware):
    """Starlette's middleware, with refusals in OpenAI's form."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code < 400:
            return answer
        message = bytes(answer.body).decode()
        if "private-network" not in message:
            message += ": pages from --allowed-origins may send GET and POST"
        headers = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return JSONResponse(refusal_body(message), status_code=answer.status_code, headers=headers)
