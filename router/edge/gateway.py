"""The HTTP gateway: OpenAI's paths and formats, and a few of vLLM's, over the same admission and generation as gRPC.

Invariant: every answer has an `x-request-id`, and every error has OpenAI's form `{"error": {...}}`, whatever went
wrong.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrelay.core.errors import KVRelayError, OverloadedError
from kvrelay.core.turns import in_turns
from router.edge.admission import Admission
from router.edge.body_budget import BodyBudget, BodyShare
from router.edge.cross_origin import cross_origin
from router.edge.echo import echoes
from router.edge.edge import Edge
from router.edge.http_exchange import EventStream, WholeAnswer, read_json_body
from router.edge.http_generation import HttpGeneration
from router.edge.openai_errors import answer_error
from router.edge.openai_format import ChatFormat, CompletionFormat, Envelope, Format, Json, to_json, tokens_response
from router.edge.openai_schema import Body, ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from router.edge.presence import Presence
from router.edge.prompt_logprobs import check_prompt_logprobs
from router.edge.untaken_answers import UntakenAnswers
from router.edge.validation import ClientRequest, TextPrompt, TokenPrompt

_REQUEST_ID = "kvrelay.request_id"

BodyT = TypeVar("BodyT", bound=Body)
GenerationBodyT = TypeVar("GenerationBodyT", bound=GenerationBody)

# So many of the largest size may arrive, and wait for their admission, at a time.
BODIES_AT_A_TIME = 32
# Of all whole answers together that clients have not taken.
MAX_UNTAKEN_BYTES = 2**28


def create_app(edge: Edge, *, version: str, max_body_bytes: int, allowed_origins: Sequence[str] = ()) -> Starlette:
    """Makes the ASGI application of one router. `/metrics` shows `edge.metrics.registry`. Scripts of web pages from
    `allowed_origins` may call it; `*` is any."""
    gateway = _Gateway(edge, version, max_body_bytes)
    app = Starlette(
        routes=[
            Route("/v1/completions", gateway.completions, methods=["POST"]),
            Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
            Route("/v1/models", gateway.models, methods=["GET"]),
            Route("/v1/models/{name:path}", gateway.model, methods=["GET"]),
            Route("/tokenize", gateway.tokenize, methods=["POST"]),
            Route("/detokenize", gateway.detokenize, methods=["POST"]),
            Route("/livez", gateway.live, methods=["GET"]),
            Route("/readyz", gateway.ready, methods=["GET"]),
            Route("/health", gateway.ready, methods=["GET"]),
            Route("/metrics", gateway.metrics, methods=["GET"]),
            Route("/version", gateway.version, methods=["GET"]),
        ],
        middleware=[
            Middleware(_RequestIds),
            *cross_origin(allowed_origins),
            # Starlette's own is outside of these: a browser would hide its answer from the page.
            Middleware(ServerErrorMiddleware, handler=answer_error),
        ],
        exception_handlers=dict.fromkeys((KVRelayError, HTTPException), answer_error),
    )
    # Behind a proxy that ends TLS, a redirect would send the client's prompt and API key again without it, to whichever
    # host the request names.
    app.router.redirect_slashes = False
    return app


@dataclass(frozen=True, slots=True)
class _Streaming:
    """How an answer is streamed: with `include_usage`, its last event has the usage; with `continuous_usage`, all."""

    include_usage: bool
    continuous_usage: bool

    @classmethod
    def of(cls, body: GenerationBody) -> Self | None:
        """Returns what a body asks for; None if the answer is not to be streamed."""
        return cls(body.include_usage, body.continuous_usage) if body.stream else None


@dataclass(frozen=True, slots=True)
class _Call:
    """The prompts of one call, as `clients`, and the form of the answer. Outputs follow the `echoed` prompts, or are
    left out with `only_echoes`. `streaming` None: the answer is whole."""

    clients: Sequence[ClientRequest]
    answer_format: Format
    streaming: _Streaming | None
    id_prefix: str
    echoed: Sequence[TextPrompt | TokenPrompt] = ()
    only_echoes: bool = False


class _Gateway:
    def __init__(self, edge: Edge, version: str, max_body_bytes: int) -> None:
        self._edge = edge
        self._version = version
        self._max_body_bytes = max_body_bytes
        self._bodies = BodyBudget(BODIES_AT_A_TIME * max_body_bytes)
        self._untaken = UntakenAnswers(MAX_UNTAKEN_BYTES)
        # Unix time, which clients expect; nothing here is measured with it.
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        return await self._respond(request, CompletionBody, self._completion)

    async def chat(self, request: Request) -> Response:
        return await self._respond(request, ChatBody, self._chat)

    def _completion(self, body: CompletionBody) -> _Call:
        with self._edge.counting_errors():
            sampling = body.sampling(logprobs=body.logprobs)
            if body.echo and body.logprobs is not None:
                sampling = replace(sampling, prompt_logprobs=body.logprobs)
            prompts = body.prompts(self._edge.relay.served_model().max_model_len)
        clients = [
            ClientRequest(
                prompt=prompt,
                sampling=sampling,
                max_tokens=1 if body.only_echoes else body.max_tokens,
                model=body.model,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
            )
            for prompt in prompts
        ]
        return _Call(
            clients,
            CompletionFormat(self._edge.tokenizer),
            _Streaming.of(body),
            id_prefix="cmpl",
            echoed=prompts if body.echo else (),
            only_echoes=body.only_echoes,
        )

    def _chat(self, body: ChatBody) -> _Call:
        with self._edge.counting_errors():
            sampling = body.sampling(logprobs=body.num_logprobs)
        newer_name = body.max_completion_tokens is not None
        client = ClientRequest(
            prompt=body.chat_prompt(),
            sampling=sampling,
            max_tokens=body.max_completion_tokens if newer_name else body.max_tokens,
            max_tokens_field="max_completion_tokens" if newer_name else "max_tokens",
            model=body.model,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
        )
        return _Call([client], ChatFormat(self._edge.tokenizer), _Streaming.of(body), id_prefix="chatcmpl")

    async def tokenize(self, request: Request) -> Response:
        with self._bodies.share() as share:
            body = await self._body(request, TokenizeBody, share)
            with self._edge.counting_errors():
                prompt = body.wanted()
            with Presence.of(request.scope):
                token_ids, max_model_len = await self._edge.tokenize(prompt, body.model)
        id_to_token = self._edge.tokenizer.backend.id_to_token
        token_strs = await in_turns(id_to_token, token_ids) if body.return_token_strs else None
        answer = await tokens_response(token_ids, token_strs, max_model_len=max_model_len)
        return WholeAnswer(answer, self._untaken)

    async def detokenize(self, request: Request) -> Response:
        with self._bodies.share() as share:
            body = await self._body(request, DetokenizeBody, share)
        text = await self._edge.detokenize(body.tokens, body.model, skip_special_tokens=False, field="tokens")
        return WholeAnswer(to_json({"prompt": text}).encode(), self._untaken)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._edge.validator.check_model(request.path_params["name"])
        return JSONResponse(self._model_card())

    async def live(self, request: Request) -> Response:
        """Answers that the process works, whatever state its nodes are in: restarting it would not help them."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Answers 503 with the reason while no decode node can serve."""
        self._edge.relay.served_model()
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        with Presence.of(request.scope):
            page = await self._edge.metrics.page()
        return Response(page, headers={"content-type": CONTENT_TYPE_LATEST})

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._version})

    async def _body(self, request: Request, form: type[BodyT], share: BodyShare) -> BodyT:
        """Reads and parses a body, whose bytes are not kept: there may be megabytes of them."""
        try:
            data = await read_json_body(request, self._max_body_bytes, share)
        except OverloadedError as error:
            self._edge.metrics.count_error(error)
            raise
        with self._edge.counting_errors():
            return form.parse(data)

    async def _respond(
        self, request: Request, form: type[GenerationBodyT], call_of: Callable[[GenerationBodyT], _Call]
    ) -> Response:
        """Answers with the outputs of all prompts of a call. If the client leaves, the work for it ends, even while its
        prompts are tokenised. While the outputs come, which may take minutes, nothing of the body is kept."""
        with ExitStack() as stack:
            admission = stack.enter_context(self._edge.admission())
            with self._bodies.share() as share:
                generation, streaming = await self._prepared(
                    request, await self._body(request, form, share), call_of, share, admission
                )
            if streaming is None:
                with Presence.of(request.scope):
                    whole = await generation.whole()
                return WholeAnswer(whole, self._untaken)
            events = generation.stream(
                include_usage=streaming.include_usage, continuous_usage=streaming.continuous_usage
            )
            answer = EventStream(events, within=admission)
            stack.pop_all()  # the answer ends it
            return answer

    async def _prepared(
        self,
        request: Request,
        body: GenerationBodyT,
        call_of: Callable[[GenerationBodyT], _Call],
        share: BodyShare,
        admission: Admission,
    ) -> tuple[HttpGeneration, _Streaming | None]:
        """Returns the generation of a call, all of whose prompts are admitted before any of them runs, and how its
        answer is streamed."""
        with Presence.of(request.scope):
            await share.turn()
            call = call_of(body)
            del body
            await share.turn()
            response_id = f"{call.id_prefix}-{request.scope[_REQUEST_ID]}"
            num_clients = len(call.clients)
            ids = [response_id] if num_clients == 1 else [f"{response_id}-{i}" for i in range(num_clients)]
            routed = await self._edge.admit(dict(zip(ids, call.clients, strict=True)), admission)
            with self._edge.counting_errors():
                check_prompt_logprobs(
                    routed,
                    num_copies=routed[0].sampling.n if call.answer_format.prompt_logprobs_in_choices else 1,
                    field="logprobs" if call.echoed and routed[0].sampling.logprobs is not None else "prompt_logprobs",
                )
                repeated = await echoes(self._edge.tokenizer, call.echoed, num_copies=routed[0].sampling.n)
        envelope = Envelope(response_id, self._edge.model_name, int(time.time()))
        generation = HttpGeneration(
            self._edge, routed, call.answer_format, envelope, echoes=repeated, only_echoes=call.only_echoes
        )
        return generation, call.streaming

    def _model_card(self) -> Json:
        return {
            "id": self._edge.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvrelay",
            "max_model_len": self._edge.relay.served_model().max_model_len,
        }


class _RequestIds:
    """The middleware that draws an id for every request and sends it back as `x-request-id`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope[_REQUEST_ID] = secrets.token_hex(16)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
