"""The HTTP gateway over real sockets, with the unmodified official client and with raw requests."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import openai
import pytest

from kvrelay.core.errors import KVError, OverloadedError
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.text.tokenizer import Tokenizer
from router.request import RequestEvent, RequestTrace, RoutedRequest
from tests.router.edge.edge_parts import MAX_MODEL_LEN, MODEL, ScriptedRelay
from tests.router.edge.gateway_client import CHAT, COMPLETION, REPLY, Gateway, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")  # one server for the whole file


@pytest.fixture
def relay(gateway: Gateway) -> ScriptedRelay:
    return gateway.relay


async def test_the_openai_client_gets_a_completion_with_usage(gateway: Gateway) -> None:
    answer = await gateway.openai.completions.create(model=MODEL, prompt="The capital", max_tokens=50, n=2)
    assert [choice.text for choice in answer.choices] == [REPLY] * 2
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_the_openai_client_streams_a_completion_with_usage_and_trace(gateway: Gateway) -> None:
    stream = await gateway.openai.completions.create(
        model=MODEL, prompt="The capital", max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == REPLY
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["kvrelay"]["decode_node"] == "decode-0"
    assert chunks[-1].model_extra["kvrelay"]["kv"]["num_holder_blocks"] == 1


async def test_the_openai_client_gets_a_chat_answer_with_logprobs(gateway: Gateway) -> None:
    answer = await gateway.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY, "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    *shown, end = choice.logprobs.content
    assert b"".join(bytes(entry.bytes or ()) for entry in shown).decode() == REPLY
    assert end.token == "</s>"
    assert all(len(entry.top_logprobs) == 2 for entry in shown)


async def test_the_openai_client_streams_several_chat_choices(gateway: Gateway) -> None:
    stream = await gateway.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        stream=True,
        n=2,
        logprobs=True,
        max_completion_tokens=3,
    )
    chunks = [chunk async for chunk in stream]
    for index in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert choices[0].delta.role == "assistant"
        assert REPLY.startswith("".join(choice.delta.content or "" for choice in choices))
        assert choices[-1].finish_reason == "length"
        assert sum(len(choice.logprobs.content or ()) for choice in choices if choice.logprobs) == 3


async def test_the_openai_client_raises_its_own_error_classes(gateway: Gateway, relay: ScriptedRelay) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        await gateway.openai.completions.create(model="gpt-5", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        await gateway.openai.completions.create(model=MODEL, prompt="x", max_tokens=-1)
    assert caught.value.param == "max_tokens"
    relay.fail_with = OverloadedError("the queue is full")
    with pytest.raises(openai.RateLimitError, match="queue is full"):
        await gateway.openai.completions.create(model=MODEL, prompt="x", stream=True)
    relay.fail_with, relay.fail_at = KVError("blocks lost"), 2
    stream = await gateway.openai.completions.create(model=MODEL, prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="blocks lost"):
        [chunk async for chunk in stream]
    assert [model.id async for model in gateway.openai.models.list()] == [MODEL]


async def test_events_are_exactly_openai_s(gateway: Gateway) -> None:
    body = {**CHAT, "max_tokens": 1, "stream_options": {"include_usage": True}}
    role, content, finish, usage, done = await gateway.events("/v1/chat/completions", body)
    assert done is None
    head = {key: role[key] for key in ("id", "object", "created", "model")}
    assert head["object"] == "chat.completion.chunk"
    assert all({key: event[key] for key in head} == head for event in (content, finish, usage))
    assert role["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert content["choices"][0]["delta"].keys() == {"content"}
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "length"
    assert role["usage"] is None
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 1


async def test_several_prompts_run_together_and_are_numbered(gateway: Gateway, relay: ScriptedRelay) -> None:
    body = {**COMPLETION, "prompt": ["one", "two", "three"], "n": 2, "echo": True}
    answer = (await gateway.post("/v1/completions", body)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == [
        prompt + REPLY for prompt in ("one", "one", "two", "two", "three", "three")
    ]
    assert len(answer["kvrelay"]["requests"]) == 3
    assert len({request.request_id for request in relay.requests}) == 3
    texts = dict.fromkeys(range(6), "")
    for event in (await gateway.events("/v1/completions", body))[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in answer["choices"]]


@dataclass
class ShortestFirstRelay(ScriptedRelay):
    """A relay that ends the request with one prompt token first, then the one with two, and so on."""

    num_ended: int = 0

    async def run(self, request: RoutedRequest) -> AsyncGenerator[RequestEvent, None]:
        num_tokens = len(request.prompt_token_ids)
        while self.num_ended < num_tokens - 1:
            await asyncio.sleep(0)
        yield TokenOutput(0, (5,), (), FinishReason.LENGTH)
        yield RequestTrace(None, "decode-0", 1, num_tokens, 0, 0, 0.0, 0.0, 0.0)
        self.num_ended += 1


async def test_traces_are_in_the_order_of_the_prompts(tokenizer: Tokenizer) -> None:
    relay = ShortestFirstRelay(tokenizer)
    body = {**COMPLETION, "prompt": [[5] * 3, [5], [5] * 2]}
    async with serving(relay) as gateway:
        whole = (await gateway.post("/v1/completions", body)).json()
        relay.num_ended = 0
        *_, last, _ = await gateway.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    for answer in (whole, last):
        assert [trace["num_computed_tokens"] for trace in answer["kvrelay"]["requests"]] == [3, 1, 2]


async def test_prompts_may_be_token_ids(gateway: Gateway, relay: ScriptedRelay) -> None:
    await gateway.post("/v1/completions", {**COMPLETION, "prompt": [5, 6, 7]})
    await gateway.post("/v1/completions", {**COMPLETION, "prompt": [[8], [9, 10]]})
    assert {request.prompt_token_ids for request in relay.requests} == {(5, 6, 7), (8,), (9, 10)}
    answer = (await gateway.post("/v1/completions", {**COMPLETION, "prompt": [0, 1], "echo": True})).json()
    assert answer["choices"][0]["text"] == f"<s></s>{REPLY}", "special tokens are part of the prompt"


async def test_stop_strings_end_the_request_on_its_nodes(gateway: Gateway, relay: ScriptedRelay) -> None:
    relay.reply = REPLY + " and of much else" * 20
    choice = (await gateway.post("/v1/completions", {**COMPLETION, "stop": "capital"})).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("Paris is the ", "stop", "capital")
    assert relay.finished == [(relay.requests[0].request_id, 0)]
    assert relay.num_running == 0
    body = {**COMPLETION, "stop": ["of F"], "include_stop_str_in_output": True}
    events = await gateway.events("/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "Paris is the capital of F"
    assert relay.num_running == 0


async def test_completion_logprobs_and_prompt_logprobs(gateway: Gateway, relay: ScriptedRelay) -> None:
    relay.reply = "naïve 你好"
    body = {**COMPLETION, "logprobs": 2, "prompt_logprobs": 1}
    choice = (await gateway.post("/v1/completions", body)).json()["choices"][0]
    logprobs = choice["logprobs"]
    lengths = {len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {len(logprobs["tokens"])}
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][0] == 0
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(relay.requests[0].prompt_token_ids)
    streamed = (await gateway.events("/v1/completions", {**COMPLETION, "logprobs": 2}))[:-1]
    found = [event["choices"][0]["logprobs"] for event in streamed]
    assert [token for shown in found if shown for token in shown["tokens"]] == logprobs["tokens"], "without text, too"


async def test_prompt_logprobs_of_a_chat_are_in_the_answer_once(gateway: Gateway, relay: ScriptedRelay) -> None:
    """As in vLLM's chat completions."""
    answer = (await gateway.post("/v1/chat/completions", {**CHAT, "n": 2, "prompt_logprobs": 1})).json()
    assert len(answer["prompt_logprobs"]) == len(relay.requests[0].prompt_token_ids)
    assert len(answer["choices"]) == 2 and not any("prompt_logprobs" in choice for choice in answer["choices"])
    assert "prompt_logprobs" not in (await gateway.post("/v1/chat/completions", CHAT)).json()


async def test_prompt_logprobs_and_cached_tokens_of_several_prompts(gateway: Gateway, relay: ScriptedRelay) -> None:
    body = {**COMPLETION, "prompt": [[5, 6], [7, 8, 9]], "n": 2, "prompt_logprobs": 1}
    answer = (await gateway.post("/v1/completions", body)).json()
    ids = [next(map(int, entry)) for choice in answer["choices"] for entry in choice["prompt_logprobs"][1:]]
    assert ids == [6, 6, 8, 9, 8, 9]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_the_stop_reason_is_a_token_only_if_the_client_asked_for_it(gateway: Gateway) -> None:
    """OpenAI's clients know nothing of the model's own end token, which is 1 here."""
    for asked, reason in (({}, None), ({"stop_token_ids": [1]}, 1)):
        choice = (await gateway.post("/v1/completions", COMPLETION | asked)).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


async def test_vllms_extra_fields_reach_the_request(gateway: Gateway, relay: ScriptedRelay) -> None:
    extras = {
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "priority": 3,
        "cache_salt": "tenant",
        "logit_bias": {"7": 2},
        "seed": -1,
        "temperature": 0,
        "top_p": 0.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "somebody_elses_field": 1,
    }
    assert (await gateway.post("/v1/completions", {**COMPLETION, **extras})).status_code == 200
    request = relay.requests[0]
    sampling = request.sampling
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0, 0.1, 1.1, 2)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.skip_special_tokens) == ((9,), True, False)
    assert (sampling.logit_bias, sampling.seed, sampling.temperature) == (((7, 2.0),), 2**64 - 1, 0.0)
    assert (sampling.top_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25, 0.75)
    assert (request.priority, request.cache_salt) == (3, b"tenant")
    relay.requests.clear()
    bare = {**COMPLETION, "add_special_tokens": False, "seed": 2**64 - 1, "best_of": 1}
    assert (await gateway.post("/v1/completions", bare)).status_code == 200
    assert relay.requests[0].prompt_token_ids == request.prompt_token_ids[1:]
    assert relay.requests[0].sampling.seed == 2**64 - 1


async def test_the_extra_fields_of_a_chat_reach_the_request(gateway: Gateway, relay: ScriptedRelay) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {
        "messages": [{"role": "developer", "content": parts}],
        "add_generation_prompt": False,
        "chat_template_kwargs": {"style": "terse", "unused": [1, {"x": None}]},
        "priority": 3,
        "cache_salt": "tenant",
        "max_tokens": 5,
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 20,
    }
    assert (await gateway.post("/v1/chat/completions", {**CHAT, **body})).status_code == 200
    [request] = relay.requests
    rendered = relay.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    assert rendered == "<style>terse\n<system>one\ntwo\n"
    assert (request.priority, request.cache_salt) == (3, b"tenant")
    assert (request.sampling.max_tokens, request.sampling.logprobs) == (5, 20)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(gateway: Gateway, relay: ScriptedRelay, stream: bool) -> None:
    relay.hang_at = 2
    body = json.dumps(COMPLETION | {"stream": stream, "n": 2}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (len(body), body)
    )
    if stream:
        await reader.readuntil(b"data: ")
    else:
        while not relay.num_running:
            await asyncio.sleep(0)
    writer.close()
    await writer.wait_closed()
    await asyncio.wait_for(relay.closed.wait(), 10)
    assert relay.num_running == 0


async def test_a_client_that_leaves_aborts_all_its_prompts(gateway: Gateway, relay: ScriptedRelay) -> None:
    relay.hang_at = 2
    async with gateway.http.stream(
        "POST", "/v1/completions", json={**COMPLETION, "prompt": ["a", "b", "c"], "stream": True}
    ) as response:
        await anext(response.aiter_bytes())
    while relay.num_running:
        await asyncio.wait_for(relay.closed.wait(), 10)
        relay.closed.clear()
    assert len(relay.requests) == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_is_aborted_before_its_first_event_is_answered_with_499(
    gateway: Gateway, relay: ScriptedRelay, stream: bool
) -> None:
    relay.hang_at = 0
    answering = asyncio.create_task(gateway.post("/v1/completions", COMPLETION | {"stream": stream}))
    while not relay.aborted:
        await asyncio.sleep(0)
    relay.abort(relay.requests[0].request_id)
    response = await answering
    assert (response.status_code, response.json()["error"]["type"]) == (499, "request_cancelled")
    assert response.headers["x-request-id"] in relay.requests[0].request_id


async def test_one_failing_prompt_fails_the_response_and_ends_the_others(
    gateway: Gateway, relay: ScriptedRelay
) -> None:
    relay.fail_with, relay.fail_at = KVError("blocks lost"), 1
    response = await gateway.post("/v1/completions", {**COMPLETION, "prompt": ["a", "b"]})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "blocks lost"
    assert relay.num_running == 0


async def test_an_error_in_the_middle_of_a_stream_is_its_last_event(gateway: Gateway, relay: ScriptedRelay) -> None:
    relay.fail_with, relay.fail_at = KVError("blocks lost"), 2
    *_, last = await gateway.events("/v1/completions", COMPLETION)
    assert last["error"]["message"] == "blocks lost"
    relay.fail_with = ZeroDivisionError("secret")
    *_, last = await gateway.events("/v1/completions", COMPLETION)
    assert last["error"]["message"] == "internal error"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_unexpected_failure_does_not_show_its_message(
    gateway: Gateway, relay: ScriptedRelay, stream: bool
) -> None:
    relay.fail_with = ZeroDivisionError("secret")
    response = await gateway.post("/v1/completions", COMPLETION | {"stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"
    assert response.headers["x-request-id"]
    assert response.headers["connection"] == "close", "as the server does"


async def test_a_text_with_ends_of_lines_cuts_no_event_of_its_stream(gateway: Gateway, relay: ScriptedRelay) -> None:
    relay.reply = "a\nb\u0085c\u2028d\u2029e"
    body = COMPLETION | {"stream": True, "echo": True, "prompt": "\u2028"}
    async with gateway.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == "\u2028" + relay.reply


async def test_unknown_paths_wrong_methods_and_model_cards_are_answered(gateway: Gateway, relay: ScriptedRelay) -> None:
    assert (await gateway.http.get("/nowhere")).json()["error"]["message"] == "Not Found: GET /nowhere"
    wrong = await gateway.http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "Method Not Allowed: GET /v1/completions"
    assert (await gateway.http.get("/version")).json() == {"version": "1.2.3"}
    assert (await gateway.http.get(f"/v1/models/{MODEL}")).json()["max_model_len"] == MAX_MODEL_LEN
    assert (await gateway.http.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


async def test_live_and_ready_are_told_apart(gateway: Gateway, relay: ScriptedRelay) -> None:
    for path in ("/health", "/readyz", "/livez"):
        assert (await gateway.http.get(path)).status_code == 200
    relay.available = False
    assert (await gateway.http.get("/livez")).status_code == 200
    for path in ("/health", "/readyz"):
        not_ready = await gateway.http.get(path)
        assert (not_ready.status_code, not_ready.headers["retry-after"]) == (503, "1")
        assert not_ready.json()["error"]["message"] == "no decode node is known"
    refused = await gateway.post("/v1/completions", COMPLETION)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.headers["connection"] == "close", "on the same connection the next try would meet the same router"


async def test_overload_is_reported_before_any_work(gateway: Gateway, relay: ScriptedRelay) -> None:
    relay.has_capacity = False
    refused = await gateway.post("/v1/completions", COMPLETION)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["type"] == "overloaded_error"
    assert not relay.requests


@pytest.mark.parametrize("prompt", [[True] * 3, [-1] * (MAX_MODEL_LEN + 1), [[1], ["x"] * (MAX_MODEL_LEN + 1)]])
async def test_token_ids_are_counted_before_they_are_looked_at(gateway: Gateway, prompt: list[object]) -> None:
    refused = await gateway.post("/v1/completions", COMPLETION | {"prompt": prompt})
    assert refused.status_code == 400
    too_long = f"has {MAX_MODEL_LEN + 1} tokens"
    assert (too_long in refused.json()["error"]["message"]) is (len(prompt) != 3)
