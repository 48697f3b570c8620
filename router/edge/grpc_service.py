"""The gRPC service `kvrelay.v1.Router`, over the same admission and generation as HTTP.

Invariant: the rest of the edge knows no protobuf. Errors are raised as KVRelayErrors, which
`kvrelay.core.rpc.calls.CallInterceptor` turns into statuses.
"""

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.rpc.calls import Context
from kvrelay.core.rpc.wire import finish_reason_to_wire, logprobs_to_wire
from kvrelay.core.turns import in_turns
from kvrelay.text.chat_message import check_role
from kvrelay.text.choice import TextChunk
from kvrelay.v1 import router_pb2, router_pb2_grpc
from router.edge.edge import Edge
from router.edge.prompt_logprobs import check_prompt_logprobs
from router.edge.validation import MAX_MESSAGES, ChatPrompt, ClientRequest, Prompt, TextPrompt, TokenPrompt
from router.request import KVOrigins, RequestTrace, RoutedRequest

SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
MAX_REQUEST_ID_CHARS = 128
REQUEST_ID_KEY = "x-request-id"  # as over HTTP
# Of the answer of `Generate`. gRPC would send more, but a message is counted and encoded in one turn of the event loop.
MAX_ANSWER_BYTES = 16 << 20

# Typed as Any because the stubs of `HasField` accept only literals.
_OPTIONAL_SAMPLING_FIELDS: tuple[Any, ...] = (
    "n",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
)


class RouterService(router_pb2_grpc.RouterServicer):
    """The service. `max_answer_bytes`: what an answer may have that is not streamed."""

    def __init__(self, edge: Edge, *, max_answer_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._edge = edge
        self._max_answer_bytes = max_answer_bytes

    async def GenerateStream(
        self, request: router_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        routed = await self._admit(request, context)
        del request  # of maybe megabytes: the answer may take minutes
        usage = router_pb2.Usage(prompt_tokens=len(routed.prompt_token_ids))
        trace: RequestTrace | None = None
        async with aclosing(self._edge.generate(routed)) as events:
            async for event in events:
                message = router_pb2.GenerateResponse(request_id=routed.request_id)
                match event:
                    case TextChunk():
                        usage.completion_tokens += len(event.token_ids)
                        _add_tokens(message.outputs.add(text=event.text), event)
                    case PromptLogprobs():
                        await add_prompt_logprobs(message, event)
                    case RequestTrace():
                        trace = event
                        continue
                yield message
        yield self._last(routed, usage, trace)

    async def Generate(self, request: router_pb2.GenerateRequest, context: Context) -> router_pb2.GenerateResponse:
        routed = await self._admit(request, context)
        del request  # of maybe megabytes: the answer may take minutes
        usage = router_pb2.Usage(prompt_tokens=len(routed.prompt_token_ids))
        num_bytes = 0  # of log-probabilities, which are most of a long answer; in the end of all of it
        n = routed.sampling.n
        whole = router_pb2.GenerateResponse(outputs=[router_pb2.OutputChunk(index=index) for index in range(n)])
        texts: list[list[str]] = [[] for _ in range(n)]
        async with aclosing(self._edge.generate(routed)) as events:
            async for event in events:
                match event:
                    case TextChunk():
                        usage.completion_tokens += len(event.token_ids)
                        texts[event.index].append(event.text)
                        num_bytes += _add_tokens(whole.outputs[event.index], event)
                    case PromptLogprobs():
                        await add_prompt_logprobs(whole, event)
                    case RequestTrace():
                        for output, pieces in zip(whole.outputs, texts, strict=True):
                            output.text = "".join(pieces)
                        whole.MergeFrom(self._last(routed, usage, event))
                        num_bytes = whole.ByteSize()
                if num_bytes > self._max_answer_bytes:
                    await events.athrow(_too_long(routed, self._max_answer_bytes))
        return whole

    async def Tokenize(self, request: router_pb2.TokenizeRequest, context: Context) -> router_pb2.TokenizeResponse:
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True
        with self._edge.counting_errors():
            match request.WhichOneof("input"):
                case "text":
                    prompt: Prompt = TextPrompt(request.text, add_special_tokens, field="text")
                case "chat":
                    if request.add_special_tokens:
                        raise InvalidRequestError(
                            "add_special_tokens cannot be combined with chat, whose template has them",
                            field="add_special_tokens",
                        )
                    prompt = _chat_prompt(request.chat)
                case _:
                    raise InvalidRequestError("text or chat is required", field="text")
        token_ids, max_model_len = await self._edge.tokenize(prompt, request.model or None)
        return router_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=max_model_len)

    async def Detokenize(
        self, request: router_pb2.DetokenizeRequest, context: Context
    ) -> router_pb2.DetokenizeResponse:
        text = await self._edge.detokenize(
            request.token_ids[:],  # a list is read faster
            request.model or None,
            skip_special_tokens=request.skip_special_tokens,
            field="token_ids",
        )
        return router_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: Context
    ) -> router_pb2.ListModelsResponse:
        model = self._edge.relay.served_model()
        card = router_pb2.Model(id=self._edge.model_name, max_model_len=model.max_model_len)
        return router_pb2.ListModelsResponse(models=[card])

    async def Abort(self, request: router_pb2.AbortRequest, context: Context) -> router_pb2.AbortResponse:
        self._edge.abort(request.request_id)
        return router_pb2.AbortResponse()

    async def _admit(self, request: router_pb2.GenerateRequest, context: Context) -> RoutedRequest:
        with self._edge.counting_errors():
            request_id = _request_id(request.request_id)
            if not request.request_id:
                context.set_trailing_metadata(((REQUEST_ID_KEY, request_id),))  # for errors, whose client has no answer
            client = _client_request(request)
        with self._edge.admission() as admission:
            (routed,) = await self._edge.admit({request_id: client}, admission)
        # It begins in this turn of the event loop, so nothing is admitted in its place.
        with self._edge.counting_errors():
            check_prompt_logprobs((routed,), num_copies=1)
        remaining = context.time_remaining()  # here, since the prompt's tokenisation has taken some of it
        return routed if remaining is None else replace(routed, timeout=min(routed.timeout, remaining))

    def _last(
        self, routed: RoutedRequest, usage: router_pb2.Usage, trace: RequestTrace | None
    ) -> router_pb2.GenerateResponse:
        if trace is not None:
            usage.cached_tokens = trace.num_cached_tokens
        return router_pb2.GenerateResponse(
            request_id=routed.request_id,
            model=self._edge.model_name,
            usage=usage,
            trace=None if trace is None else _trace_to_wire(trace),
        )


def _request_id(wanted: str) -> str:
    if len(wanted) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequestError(f"request_id must have at most {MAX_REQUEST_ID_CHARS} characters", field="request_id")
    if not wanted.isprintable():  # because ids are logged
        raise InvalidRequestError("request_id must have printable characters only", field="request_id")
    return wanted or f"grpc-{secrets.token_hex(16)}"


def _client_request(request: router_pb2.GenerateRequest) -> ClientRequest:
    """Converts a request. Protobuf has checked its types; `RequestValidator` checks its values."""
    match request.WhichOneof("input"):
        case "prompt":
            prompt: Prompt = TextPrompt(request.prompt)
        case "prompt_token_ids":
            prompt = TokenPrompt(request.prompt_token_ids.ids, field="prompt_token_ids")
        case "chat":
            prompt = _chat_prompt(request.chat)
        case _:
            raise InvalidRequestError("prompt, prompt_token_ids or chat is required", field="prompt")
    given = {name: getattr(request, name) for name in _OPTIONAL_SAMPLING_FIELDS if request.HasField(name)}
    sampling = SamplingParams(
        **given,
        logit_bias=request.logit_bias,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
    )
    return ClientRequest(
        prompt=prompt,
        sampling=sampling,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        model=request.model or None,
        priority=request.priority,
        cache_salt=request.cache_salt or None,
    )


def _chat_prompt(chat: router_pb2.ChatMessages) -> ChatPrompt:
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(chat.messages)} entries, at most {MAX_MESSAGES} are allowed", field="messages"
        )
    for number, message in enumerate(chat.messages):
        check_role(message.role, number)
    return ChatPrompt([{"role": message.role, "content": message.content} for message in chat.messages])


def _too_long(routed: RoutedRequest, max_bytes: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the answer has more than the {max_bytes} bytes that one message may have: use GenerateStream, or ask for "
        "less with logprobs, n or max_tokens",
        field="max_tokens" if routed.sampling.logprobs is None else "logprobs",
    )


async def add_prompt_logprobs(message: router_pb2.GenerateResponse, found: PromptLogprobs) -> None:
    """Adds those of a prompt to a message, of which there may be a million. The event loop turns after some of them: it
    would take long to make them, and as long to add them."""

    def add(entry: TokenLogprobs) -> None:
        message.prompt_logprobs.append(logprobs_to_wire(entry))

    await in_turns(add, found)


def _add_tokens(output: router_pb2.OutputChunk, chunk: TextChunk) -> int:
    """Appends a chunk to an output, which is empty or has the chunks before; all but its text. Returns the bytes of its
    log-probabilities."""
    entries = [logprobs_to_wire(entry) for entry in chunk.logprobs]
    output.index = chunk.index
    output.token_ids.extend(chunk.token_ids)
    output.logprobs.extend(entries)
    output.finish_reason = finish_reason_to_wire(chunk.finish_reason)
    if chunk.stop_reason is not None:
        output.stop_reason = str(chunk.stop_reason)
    if isinstance(chunk.stop_reason, int):
        output.stop_token_id = chunk.stop_reason
    return sum(entry.ByteSize() for entry in entries)


def _trace_to_wire(trace: RequestTrace) -> router_pb2.RequestTrace:
    return router_pb2.RequestTrace(
        prefill_node=trace.prefill_node or "",
        decode_node=trace.decode_node,
        num_prompt_blocks=trace.num_prompt_blocks,
        num_computed_tokens=trace.num_computed_tokens,
        num_cached_tokens=trace.num_cached_tokens,
        num_transferred_blocks=trace.num_transferred_blocks,
        ttft_seconds=trace.ttft_seconds,
        handover_seconds=trace.handover_seconds,
        e2e_seconds=trace.e2e_seconds,
        queue_seconds=trace.queue_seconds,
        num_migrations=trace.num_migrations,
        kv=router_pb2.KVOrigins(**{name: getattr(trace.kv, name) for name in KVOrigins.__slots__}),
    )
