"""The service `kvrelay.v1.Router` over a real connection: every method, deadlines, cancellation, errors with fields."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from kvrelay.core.errors import (
    CancelledByPeerError,
    ContextLengthError,
    InvalidRequestError,
    KVError,
    UnavailableError,
    UnknownModelError,
)
from kvrelay.core.generation.sampling_params import MAX_STOP_STRINGS, MAX_TOKEN_ENTRIES
from kvrelay.core.rpc.errors import error_from_rpc
from kvrelay.text.tokenizer import LONG_TEXT_CHARS
from kvrelay.v1 import common_pb2, router_pb2
from router.edge.edge import Edge
from router.edge.grpc_service import _OPTIONAL_SAMPLING_FIELDS, MAX_REQUEST_ID_CHARS, RouterService
from router.edge.prompt_logprobs import MAX_ENTRIES
from router.edge.validation import MAX_MESSAGES
from tests.router.edge.edge_parts import MAX_MODEL_LEN, MODEL, ScriptedRelay, counted, make_edge
from tests.router.edge.grpc_client import Stub, serving
from tests.router.scripted_nodes import until

REPLY = "Paris is the capital of France"
WIZARD = router_pb2.ChatMessage(role="wizard", content="x")
HELLO = router_pb2.ChatMessage(role="user", content="hello")


@pytest.fixture
def edge(relay: ScriptedRelay) -> Edge:
    return make_edge(relay)


@pytest.fixture
async def stub(edge: Edge) -> AsyncIterator[Stub]:
    async with serving(RouterService(edge)) as stub:
        yield stub


def prompt(**fields: object) -> router_pb2.GenerateRequest:
    return router_pb2.GenerateRequest(prompt="The capital", max_tokens=50, **fields)  # type: ignore[arg-type]


async def test_a_streamed_generation_has_every_chunk_and_ends_with_usage_and_trace(
    stub: Stub, relay: ScriptedRelay
) -> None:
    messages = [message async for message in stub.GenerateStream(prompt(n=2, logprobs=2, prompt_logprobs=1))]
    *chunks, last = messages
    assert len(chunks[0].prompt_logprobs) == last.usage.prompt_tokens - 1
    for index in range(2):
        outputs = [output for message in chunks for output in message.outputs if output.index == index]
        assert "".join(output.text for output in outputs) == REPLY
        end = outputs[-1]
        assert (end.finish_reason, end.stop_reason, end.stop_token_id) == (common_pb2.FINISH_REASON_STOP, "1", 1)
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        assert len(outputs[0].logprobs[0].top_token_ids) == len(outputs[0].logprobs[0].top_logprobs) == 2
    assert last.model == MODEL
    assert last.usage.prompt_tokens == len(relay.requests[0].prompt_token_ids)
    assert last.usage.completion_tokens == sum(len(o.token_ids) for m in chunks for o in m.outputs)
    assert last.usage.cached_tokens == 2
    assert (last.trace.prefill_node, last.trace.decode_node) == ("prefill-0", "decode-0")
    assert (last.trace.queue_seconds, last.trace.ttft_seconds, last.trace.e2e_seconds) == (0.001, 0.002, 0.003)
    assert last.trace.handover_seconds == 0.004
    assert (last.trace.kv.num_holder_blocks, last.trace.kv.num_recomputed_tokens) == (1, 3)
    assert {message.request_id for message in messages} == {relay.requests[0].request_id}


async def test_a_unary_generation_merges_the_chunks_of_each_output(stub: Stub) -> None:
    response = await stub.Generate(prompt(n=2, prompt_logprobs=1, stop=["capital"]))
    assert [output.text for output in response.outputs] == ["Paris is the "] * 2
    assert [(one.stop_reason, one.HasField("stop_token_id")) for one in response.outputs] == [("capital", False)] * 2
    assert len(response.prompt_logprobs) == response.usage.prompt_tokens - 1
    assert response.model == MODEL
    whole = await stub.Generate(prompt(n=2, logprobs=1, stop=["capital"], include_stop_str_in_output=True))
    for output in whole.outputs:
        assert output.text == "Paris is the capital"
        assert len(output.logprobs) == len(output.token_ids) == whole.usage.completion_tokens // 2 > 1


async def test_an_answer_that_is_too_long_for_a_message_ends_the_request(
    stub: Stub, edge: Edge, relay: ScriptedRelay
) -> None:
    """gRPC would refuse to send it, with a status after which clients try again."""
    for fields in ({"n": 2, "logprobs": 20}, {"n": 2}):
        size = (await stub.Generate(prompt(**fields))).ByteSize()
        async with serving(RouterService(edge, max_answer_bytes=size)) as exact:
            assert (await exact.Generate(prompt(**fields))).ByteSize() == size
        before = counted(edge, "request_errors_total", code="INVALID_ARGUMENT") or 0.0
        async with serving(RouterService(edge, max_answer_bytes=size - 1)) as short:
            with pytest.raises(grpc.aio.AioRpcError, match="use GenerateStream") as caught:
                await short.Generate(prompt(**fields))
            assert [message async for message in short.GenerateStream(prompt(**fields))]
        error = cast(InvalidRequestError, error_from_rpc(caught.value))
        assert error.field == ("logprobs" if "logprobs" in fields else "max_tokens")
        assert counted(edge, "request_errors_total", code="INVALID_ARGUMENT") == before + 1
    relay.hang_at = 5  # if it does not end as soon as it is too long
    async with serving(RouterService(edge, max_answer_bytes=1000)) as short:
        with pytest.raises(grpc.aio.AioRpcError, match="use GenerateStream"):
            await short.Generate(prompt(n=2, logprobs=20))
    assert relay.num_running == 0


async def test_overloaded_and_unavailable_errors_say_when_to_retry(stub: Stub, relay: ScriptedRelay) -> None:
    for change, code in (
        ("has_capacity", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("available", grpc.StatusCode.UNAVAILABLE),
    ):
        relay.reset()
        setattr(relay, change, False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(prompt())
        assert caught.value.code() is code
        status = rpc_status.from_call(cast(grpc.Call, caught.value))
        assert status is not None
        retry = error_details_pb2.RetryInfo()
        [found] = [detail for detail in status.details if detail.Is(retry.DESCRIPTOR)]
        assert found.Unpack(retry) and retry.retry_delay.seconds == 1


async def test_too_many_token_ids_are_refused_without_looking_at_them(stub: Stub) -> None:
    ids = router_pb2.TokenIds(ids=[2**32 - 1] * (MAX_MODEL_LEN + 1))
    with pytest.raises(grpc.aio.AioRpcError, match=f"the prompt has {MAX_MODEL_LEN + 1} tokens") as caught:
        await stub.Generate(router_pb2.GenerateRequest(prompt_token_ids=ids))
    assert isinstance(error_from_rpc(caught.value), ContextLengthError)
    with pytest.raises(grpc.aio.AioRpcError, match=f"token_ids has {MAX_MODEL_LEN + 1} entries"):
        await stub.Detokenize(router_pb2.DetokenizeRequest(token_ids=ids.ids))


async def test_prompt_logprobs_that_no_message_could_hold_are_refused(
    stub: Stub, edge: Edge, relay: ScriptedRelay
) -> None:
    """The node's message with them would break the stream that all its requests share."""
    relay.max_model_len = 2 * MAX_ENTRIES
    ids = router_pb2.TokenIds(ids=[5] * (MAX_ENTRIES // 21 + 1))
    with pytest.raises(grpc.aio.AioRpcError, match="prompt_logprobs of 20 would make") as caught:
        await stub.Generate(router_pb2.GenerateRequest(prompt_token_ids=ids, prompt_logprobs=20))
    assert cast(InvalidRequestError, error_from_rpc(caught.value)).field == "prompt_logprobs"
    assert counted(edge, "request_errors_total", code="INVALID_ARGUMENT") == 1
    assert not relay.requests


async def test_every_input_and_field_arrives(stub: Stub, relay: ScriptedRelay) -> None:
    as_given = {
        "n": 1,
        "max_tokens": 3,
        "min_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "seed": 2**64 - 1,
        "logprobs": 1,
        "prompt_logprobs": 2,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    request = router_pb2.GenerateRequest(
        request_id="mine",
        model=MODEL,
        prompt_token_ids=router_pb2.TokenIds(ids=[5, 6, 7]),
        top_k=-1,
        logit_bias={5: -1.5},
        stop=["zebra"],
        stop_token_ids=[9],
        priority=-2,
        cache_salt="salt",
        **as_given,  # type: ignore[arg-type]
    )
    fields, given = request.DESCRIPTOR.fields, {field.name for field, _ in request.ListFields()}
    assert {field.name for field in fields} - given == {"prompt", "chat"}, "no other one is left out"
    optional = {field.name for field in fields if field.has_presence and not field.message_type}
    assert optional - {"prompt", "max_tokens"} == set(_OPTIONAL_SAMPLING_FIELDS)
    response = await stub.Generate(request, timeout=20)
    assert response.request_id == "mine"
    assert response.outputs[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    routed = relay.requests[0]
    assert (routed.request_id, routed.prompt_token_ids) == ("mine", (5, 6, 7))
    assert (routed.priority, routed.cache_salt) == (-2, b"salt")
    assert 10 < routed.timeout < 21  # gRPC rounds deadlines up
    for timeout in (None, 1000.0):
        await stub.Generate(prompt(), timeout=timeout)
        assert relay.requests[-1].timeout == 60.0, "a client's own time only shortens it"
    sampling = routed.sampling
    assert {name: getattr(sampling, name) for name in as_given} == as_given
    others = (sampling.top_k, sampling.stop, sampling.logit_bias, sampling.stop_token_ids)
    assert others == (0, ("zebra",), ((5, -1.5),), (9,))


async def test_a_chat_is_rendered_with_the_models_template(stub: Stub, relay: ScriptedRelay) -> None:
    chat = router_pb2.ChatMessages(messages=[router_pb2.ChatMessage(role="user", content="hello")])
    assert (await stub.Generate(router_pb2.GenerateRequest(chat=chat))).outputs[0].text == REPLY
    token_ids = (await stub.Tokenize(router_pb2.TokenizeRequest(chat=chat))).token_ids
    assert tuple(token_ids) == relay.requests[0].prompt_token_ids


async def test_tokenize_and_detokenize_are_inverse_and_the_model_is_listed(stub: Stub) -> None:
    tokenized = await stub.Tokenize(router_pb2.TokenizeRequest(text="hello 你好"))
    assert tokenized.max_model_len == MAX_MODEL_LEN
    request = router_pb2.DetokenizeRequest(token_ids=tokenized.token_ids)
    assert (await stub.Detokenize(request)).text == "<s>hello 你好"
    request.skip_special_tokens = True
    assert (await stub.Detokenize(request)).text == "hello 你好"
    assert (await stub.Detokenize(router_pb2.DetokenizeRequest())).text == ""
    full = router_pb2.DetokenizeRequest(token_ids=[tokenized.token_ids[1]] * MAX_MODEL_LEN)
    assert len((await stub.Detokenize(full)).text) >= MAX_MODEL_LEN
    bare = await stub.Tokenize(router_pb2.TokenizeRequest(text="hello 你好", add_special_tokens=False))
    assert bare.token_ids == tokenized.token_ids[1:]
    assert not (await stub.Tokenize(router_pb2.TokenizeRequest(text="", add_special_tokens=False))).token_ids
    models = (await stub.ListModels(router_pb2.ListModelsRequest())).models
    assert [(model.id, model.max_model_len) for model in models] == [(MODEL, MAX_MODEL_LEN)]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (router_pb2.GenerateRequest(), "prompt"),
        (router_pb2.GenerateRequest(prompt_token_ids=router_pb2.TokenIds()), "prompt_token_ids"),
        (router_pb2.GenerateRequest(prompt_token_ids=router_pb2.TokenIds(ids=[2**32 - 1])), "prompt_token_ids"),
        (router_pb2.GenerateRequest(prompt_token_ids=router_pb2.TokenIds(ids=[5] * MAX_MODEL_LEN)), "prompt_token_ids"),
        (router_pb2.GenerateRequest(prompt="x", max_tokens=-1), "max_tokens"),
        (router_pb2.GenerateRequest(prompt="x", max_tokens=0), "max_tokens"),
        (router_pb2.GenerateRequest(prompt="x", top_k=-5), "top_k"),
        (router_pb2.GenerateRequest(prompt="x", n=0), "n"),
        (router_pb2.GenerateRequest(prompt="x", request_id="i" * 1000), "request_id"),
        (router_pb2.GenerateRequest(prompt="x", request_id="a\r2025-01-31T12:00:00.123Z INFO"), "request_id"),
        (router_pb2.GenerateRequest(prompt="x" * 2_000_000), "prompt"),
        (router_pb2.GenerateRequest(prompt="x", stop=["a"] * (MAX_STOP_STRINGS + 1)), "stop"),
        (router_pb2.GenerateRequest(prompt="x", stop_token_ids=[5] * (MAX_TOKEN_ENTRIES + 1)), "stop_token_ids"),
        (router_pb2.GenerateRequest(chat=router_pb2.ChatMessages(messages=[HELLO] * (MAX_MESSAGES + 1))), "messages"),
        (router_pb2.GenerateRequest(chat=router_pb2.ChatMessages(messages=[HELLO, WIZARD])), "messages"),
    ],
)
async def test_bad_input_names_its_field_and_the_next_request_works(
    stub: Stub, request_: router_pb2.GenerateRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_from_rpc(caught.value)
    assert isinstance(error, InvalidRequestError)
    assert error.field == field
    assert (await stub.Generate(prompt())).outputs[0].text == REPLY


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (router_pb2.TokenizeRequest(), "text"),
        (router_pb2.TokenizeRequest(text="x" * 2_000_000), "text"),
        (router_pb2.TokenizeRequest(chat=router_pb2.ChatMessages()), "messages"),
        (
            router_pb2.TokenizeRequest(chat=router_pb2.ChatMessages(messages=[HELLO]), add_special_tokens=True),
            "add_special_tokens",
        ),
    ],
)
async def test_what_cannot_be_tokenised_has_its_field_named(
    stub: Stub, request_: router_pb2.TokenizeRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        await stub.Tokenize(request_)
    assert cast(InvalidRequestError, error_from_rpc(caught.value)).field == field


async def test_a_token_id_outside_the_vocabulary_is_not_detokenized(stub: Stub, relay: ScriptedRelay) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="outside the vocabulary") as caught:
        await stub.Detokenize(router_pb2.DetokenizeRequest(token_ids=[5, relay.tokenizer.vocab_size]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_model_has_an_error_of_its_own(stub: Stub) -> None:
    for call in (
        stub.Generate(prompt(model="other")),
        stub.Tokenize(router_pb2.TokenizeRequest(text="x", model="other")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert isinstance(error_from_rpc(caught.value), UnknownModelError)


async def test_errors_of_the_relay_keep_their_class(stub: Stub, relay: ScriptedRelay) -> None:
    relay.fail_with, relay.fail_at = KVError("lost"), 2
    call = stub.GenerateStream(prompt())
    assert isinstance(await call.read(), router_pb2.GenerateResponse)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await call.read()
    assert isinstance(error_from_rpc(caught.value), KVError)
    relay.available = False
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(prompt())
    assert isinstance(error_from_rpc(caught.value), UnavailableError)


async def test_the_id_that_the_router_drew_is_in_the_trailing_metadata(stub: Stub, relay: ScriptedRelay) -> None:
    """Of errors too, which have no message with it."""
    call = stub.Generate(prompt())
    assert (await call).request_id == (await call.trailing_metadata())["x-request-id"]
    for error in (KVError("lost"), ZeroDivisionError("our own fault")):
        relay.fail_with = error
        for streamed in (False, True):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (stub.GenerateStream(prompt()).read() if streamed else stub.Generate(prompt()))
            assert caught.value.trailing_metadata()["x-request-id"] == relay.requests[-1].request_id
            assert rpc_status.from_call(cast(grpc.Call, caught.value)) is not None
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(prompt(n=0))
    assert str(caught.value.trailing_metadata()["x-request-id"]).startswith("grpc-")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(prompt(request_id="chosen \N{SNOWMAN}", n=0))
    assert "x-request-id" not in caught.value.trailing_metadata()


async def test_cancelling_aborts_the_request(stub: Stub, edge: Edge, relay: ScriptedRelay) -> None:
    relay.hang_at = 1
    call = stub.GenerateStream(prompt(), timeout=60)
    await call.read()
    call.cancel()
    await asyncio.wait_for(relay.closed.wait(), 10)
    assert relay.num_running == 0
    await until(lambda: counted(edge, "num_requests_running") == 0)
    assert counted(edge, "request_success_total", finished_reason="abort") == 1


async def test_a_deadline_ends_the_request_and_is_counted_as_one(stub: Stub, edge: Edge, relay: ScriptedRelay) -> None:
    relay.hang_at = 1
    for timeout in (0.2, 2.0, 20.0):  # until the request comes as far as the relay, and both of its ends in time
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(prompt(), timeout=timeout)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: counted(edge, "num_requests_running") == 0)
        if counted(edge, "request_errors_total", code="DEADLINE_EXCEEDED"):
            break
    assert counted(edge, "request_errors_total", code="DEADLINE_EXCEEDED")
    assert relay.closed.is_set() and relay.num_running == 0


async def test_abort_ends_a_running_request_and_ids_are_unique_while_they_run(
    stub: Stub, edge: Edge, relay: ScriptedRelay
) -> None:
    relay.hang_at = 1
    call = stub.GenerateStream(prompt(request_id="mine"))
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(prompt(request_id="mine"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert counted(edge, "request_errors_total", code="INVALID_ARGUMENT") == 1
    await stub.Abort(router_pb2.AbortRequest(request_id="nobody"))
    await stub.Abort(router_pb2.AbortRequest(request_id="mine"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(error_from_rpc(caught.value), CancelledByPeerError)
    relay.reset()
    assert (await stub.Generate(prompt(request_id="mine"))).request_id == "mine", "an id is free again"
    longest = "i" * MAX_REQUEST_ID_CHARS
    assert (await stub.Generate(prompt(request_id=longest))).request_id == longest


async def test_abort_ends_a_request_that_is_being_tokenised(stub: Stub, edge: Edge, relay: ScriptedRelay) -> None:
    relay.max_model_len = 10**6
    relay.hang_at = 0  # it ends only if it is aborted
    long = router_pb2.GenerateRequest(prompt="hello world " * 4 * LONG_TEXT_CHARS, request_id="mine")
    call = stub.Generate(long, timeout=10)
    await relay.capacity_checked.wait()
    await stub.Abort(router_pb2.AbortRequest(request_id="mine"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert isinstance(error_from_rpc(caught.value), CancelledByPeerError)
    assert counted(edge, "request_errors_total", code="CANCELLED") == 1


def test_all_that_a_client_is_generated_from_names_its_go_package() -> None:
    """Without the option, protoc makes no Go code."""
    for file in (router_pb2.DESCRIPTOR, *router_pb2.DESCRIPTOR.dependencies):
        assert file.GetOptions().go_package == "kvrelay/v1;kvrelayv1"
