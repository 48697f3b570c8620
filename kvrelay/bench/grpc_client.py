"""The client of a kvrelay router over gRPC (`kvrelay.v1.Router.GenerateStream`)."""

import asyncio
from functools import partial
from typing import cast

import grpc

from kvrelay.bench.base import Answer, Failure, Generation, Prompt, Send, messages_of
from kvrelay.bench.model_choice import choose_model
from kvrelay.core.clock import Clock
from kvrelay.core.errors import UnavailableError
from kvrelay.core.rpc.connections import channel_options
from kvrelay.core.rpc.errors import DETAILS_KEY, stranger
from kvrelay.v1 import router_pb2, router_pb2_grpc

_CHECK_TIMEOUT_SECONDS = 10.0
_PIECE_TOKENS = 2048  # copied between two turns of the loop
# gRPC also takes the least delay between attempts as the time that one attempt may take: too little on a busy machine.
_OPTIONS = [option for option in channel_options() if option[0] != "grpc.min_reconnect_backoff_ms"]


class GrpcClient:
    """A client of the router at `address`, host:port."""

    def __init__(self, address: str, generation: Generation, clock: Clock) -> None:
        self._address = address
        self._generation = generation
        self._clock = clock
        self._model = ""
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = cast("router_pb2_grpc.RouterAsyncStub", router_pb2_grpc.RouterStub(self._channel))

    async def resolve_model(self, wanted: str) -> str:
        try:
            response = await self._stub.ListModels(router_pb2.ListModelsRequest(), timeout=_CHECK_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):  # a router's own words
                raise UnavailableError(
                    f"grpc://{self._address} answers {error.code().name} ({error.details()}); wait until it is ready"
                ) from error
            if found := stranger(error.code(), error.details() or "", "router"):
                raise UnavailableError(
                    f"what answers at grpc://{self._address} {found}; give the router's gRPC address with --url "
                    "grpc://host:port, or the address of a server that speaks HTTP with http://"
                ) from error
            raise UnavailableError(
                f"no router answers at grpc://{self._address} ({error.details()}); start one with `kvrelay serve "
                "MODEL`, or give its gRPC address with --url grpc://host:port"
            ) from error
        served = [model.id for model in response.models]
        self._model = choose_model(wanted, served, where=f"grpc://{self._address}")
        return self._model

    async def prepare(self, prompt: Prompt, max_tokens: int) -> Send:
        request = router_pb2.GenerateRequest(
            model=self._model,
            max_tokens=max_tokens,
            temperature=self._generation.temperature,
            ignore_eos=self._generation.ignore_eos,
            top_k=self._generation.top_k or None,
            top_p=self._generation.top_p if self._generation.top_p < 1.0 else None,
        )
        if isinstance(prompt, str):
            request.prompt = prompt
        elif prompt and isinstance(prompt[0], tuple):
            for role, content in messages_of(prompt):
                request.chat.messages.add(role=role, content=content)
        else:
            token_ids = request.prompt_token_ids.ids
            for begin in range(0, len(prompt), _PIECE_TOKENS):
                token_ids.extend(part for part in prompt[begin : begin + _PIECE_TOKENS] if isinstance(part, int))
                await asyncio.sleep(0)
        return partial(self._send, request)

    async def _send(self, request: router_pb2.GenerateRequest, answer: Answer) -> None:
        texts: list[str] = []
        token_ids: list[int] = []
        answer.sent = self._clock.now()
        stream = self._stub.GenerateStream(request, timeout=self._generation.timeout)
        try:
            async for response in stream:
                now = self._clock.now()
                for output in response.outputs:
                    if output.token_ids:
                        answer.arrivals.append(now)
                        texts.append(output.text)
                        token_ids += output.token_ids
                        answer.num_output_tokens = len(token_ids)
                if response.HasField("usage"):
                    _count(response.usage, answer)
        except grpc.aio.AioRpcError as error:
            kind = "timeout" if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else f"grpc {error.code().name}"
            answer.failure = Failure(kind, error.details() or error.code().name)
        finally:
            stream.cancel()
        answer.text, answer.token_ids = "".join(texts), tuple(token_ids)
        answer.finished = self._clock.now()

    async def close(self) -> None:
        await self._channel.close()


def _count(usage: router_pb2.Usage, answer: Answer) -> None:
    answer.num_output_tokens = usage.completion_tokens
    answer.num_prompt_tokens = usage.prompt_tokens
    answer.num_cached_tokens = usage.cached_tokens
