"""Which model is benchmarked, of a server that has none, one or several."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest

from kvrelay.bench.measure import measure
from kvrelay.bench.model_choice import choose_model
from kvrelay.bench.settings import LatencyBenchSettings
from kvrelay.core.errors import UnknownModelError
from kvrelay.core.rpc.connections import serve_insecure
from kvrelay.v1 import router_pb2
from tests.bench.servers import answering


@pytest.mark.parametrize(
    ("wanted", "served", "chosen"),
    [("", ["a"], "a"), ("a", ["a"], "a"), ("b", ["a", "b"], "b"), ("b", [], "b")],
)
def test_the_wanted_model_is_chosen_or_the_only_one(wanted: str, served: list[str], chosen: str) -> None:
    assert choose_model(wanted, served, where="there") == chosen


@asynccontextmanager
async def serving(protocol: str, models: Sequence[str]) -> AsyncIterator[str]:
    """Yields the URL of a server that lists these models."""
    if protocol == "http":
        async with answering(models=models) as url:
            yield url
        return

    async def list_models(request: object, context: object) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse(models=[router_pb2.Model(id=name) for name in models])

    handler = grpc.unary_unary_rpc_method_handler(
        list_models,
        request_deserializer=router_pb2.ListModelsRequest.FromString,
        response_serializer=router_pb2.ListModelsResponse.SerializeToString,
    )
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("kvrelay.v1.Router", {"ListModels": handler}),)
    )
    yield f"grpc://127.0.0.1:{await serve_insecure(server, '127.0.0.1', 0)}"
    await server.stop(None)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    ("wanted", "served", "message"),
    [
        ("", [], "names no model: give one with --model"),
        ("", ["a", "b"], "has several models: choose one with --model: a, b"),
        ("c", ["a", "b"], "--model: no model 'c' there; .* has a, b"),
    ],
)
async def test_what_cannot_be_chosen_is_refused_with_what_to_do(
    protocol: str, wanted: str, served: list[str], message: str
) -> None:
    async with serving(protocol, served) as url:
        with pytest.raises(UnknownModelError, match=message):
            await measure(LatencyBenchSettings(url=url, model=wanted, vocab_size=258, progress="off"))
