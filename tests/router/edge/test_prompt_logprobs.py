"""Log-probabilities of prompts in vLLM's form: what is encoded, how often, and how long the loop waits for it."""

import asyncio
import json
import math
from itertools import pairwise

import pytest

from kvrelay.core.errors import InvalidRequestError
from kvrelay.core.generation.outputs import TokenLogprobs
from kvrelay.core.generation.prompt_logprobs import PromptLogprobs
from kvrelay.core.generation.sampling_params import MAX_LOGPROBS, SamplingParams
from kvrelay.core.rpc.connections import MAX_MESSAGE_BYTES
from kvrelay.core.rpc.wire import logprobs_to_wire, prompt_logprobs_to_wire
from kvrelay.core.turns import ITEMS_AT_A_TIME
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import router_pb2
from router.edge.grpc_service import MAX_ANSWER_BYTES, add_prompt_logprobs
from router.edge.openai_format import (
    MIN_LOGPROB,
    CompletionFormat,
    Envelope,
    Usage,
    WholeChoice,
    whole_response,
)
from router.edge.prompt_logprobs import MAX_ENTRIES, check_prompt_logprobs, encoded_prompt_logprobs
from router.request import RoutedRequest
from tests.loop_turns import counting_turns
from tests.peak_memory import tracing_peak
from tests.router.scripted_nodes import NAMESPACE


async def test_each_token_but_the_first_has_the_likeliest_and_itself(tokenizer: Tokenizer) -> None:
    absent = TokenLogprobs(5, -3.0, 9, ((6, -0.5), (7, -1.0)))
    present = TokenLogprobs(7, -1.0, 2, ((6, -0.5), (7, -1.0)))

    def one(token_id: int, logprob: float, rank: int) -> dict[str, object]:
        return {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    likely = {"6": one(6, -0.5, 1), "7": one(7, -1.0, 2)}
    found = json.loads(await encoded_prompt_logprobs(tokenizer, [absent, present]))
    assert found == [None, {**likely, "5": one(5, -3.0, 9)}, likely]
    assert json.loads(await encoded_prompt_logprobs(tokenizer, [])) == [None]


async def test_tokens_that_are_equally_likely_share_a_rank(tokenizer: Tokenizer) -> None:
    """The likeliest are numbered, and only of the prompt's own token the rank is known."""
    entries = [TokenLogprobs(7, -0.5, 1, ((6, -0.5), (7, -0.5)))]
    [_, found] = json.loads(await encoded_prompt_logprobs(tokenizer, entries))
    assert {token_id: entry["rank"] for token_id, entry in found.items()} == {"6": 1, "7": 1}


async def test_a_token_that_cannot_occur_has_a_number(tokenizer: Tokenizer) -> None:
    """JSON has no infinity."""
    text = await encoded_prompt_logprobs(tokenizer, [TokenLogprobs(5, -math.inf, 9, ((6, -math.inf),))])
    assert b"Infinity" not in text and text.count(str(MIN_LOGPROB).encode()) == 2


async def test_the_loop_turns_while_a_long_prompt_is_encoded(tokenizer: Tokenizer) -> None:
    async with counting_turns() as num_turns:
        await encoded_prompt_logprobs(tokenizer, [TokenLogprobs(5, -1.0, 1)] * (20 * ITEMS_AT_A_TIME))
        assert num_turns() >= 20


async def test_what_is_encoded_is_copied_only_once(tokenizer: Tokenizer) -> None:
    """It may have 70 MB, and each copy keeps the event loop waiting."""
    entries = [TokenLogprobs(5, -1.0, 1, tuple((6 + i, -2.0) for i in range(MAX_LOGPROBS)))] * 1000
    with tracing_peak() as most_bytes:
        encoded = await encoded_prompt_logprobs(tokenizer, entries)
        assert most_bytes() < 2.5 * len(encoded)


async def test_a_grpc_message_gets_a_few_tokens_at_a_time() -> None:
    num_tokens = 20 * ITEMS_AT_A_TIME
    message = router_pb2.GenerateResponse()
    found = PromptLogprobs.of([TokenLogprobs(5, -1.0, 1)] * num_tokens)
    adding = asyncio.create_task(add_prompt_logprobs(message, found))
    lengths = [0]
    while not adding.done():
        await asyncio.sleep(0)
        lengths.append(len(message.prompt_logprobs))
    assert lengths[-1] == num_tokens
    assert max(later - earlier for earlier, later in pairwise(lengths)) <= ITEMS_AT_A_TIME


@pytest.mark.parametrize(("num_copies", "num_prompts"), [(64, 1), (1, 64), (16, 4)])
def test_one_answer_has_a_bounded_number_of_entries(num_copies: int, num_prompts: int) -> None:
    def requests(num_tokens: int, prompt_logprobs: int | None) -> list[RoutedRequest]:
        sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
        return [RoutedRequest("r", (5,) * num_tokens, sampling, NAMESPACE, timeout=60.0)] * num_prompts

    most = MAX_ENTRIES // 64 // 4
    check_prompt_logprobs(requests(most, 3), num_copies=num_copies)
    check_prompt_logprobs(requests(most + 1, None), num_copies=num_copies)
    with pytest.raises(InvalidRequestError, match="ask for fewer") as refused:
        check_prompt_logprobs(requests(most + 1, 3), num_copies=num_copies)
    assert refused.value.field == "prompt_logprobs"


@pytest.mark.parametrize("num_likeliest", [0, MAX_LOGPROBS])
def test_all_that_an_answer_may_have_fits_in_one_message_of_a_node(num_likeliest: int) -> None:
    """A message that is too large would end the stream on which a decode node answers all of the router's requests."""
    num_tokens = MAX_ENTRIES // (num_likeliest + 1)
    columns = [bytes(4 * num_tokens)] * 3 + [bytes(4 * num_tokens * num_likeliest)] * 2
    assert prompt_logprobs_to_wire(PromptLogprobs.of_bytes(*columns)).ByteSize() < MAX_MESSAGE_BYTES


@pytest.mark.parametrize("num_likeliest", [0, MAX_LOGPROBS])
def test_all_that_an_answer_may_have_fits_in_one_message_to_a_grpc_client(num_likeliest: int) -> None:
    vocab_size = 2**18
    entry = TokenLogprobs(vocab_size - 1, -1.0, vocab_size, ((vocab_size - 1, -1.0),) * num_likeliest)
    size = router_pb2.GenerateResponse(prompt_logprobs=[logprobs_to_wire(entry)]).ByteSize()
    assert MAX_ENTRIES // (num_likeliest + 1) * size < MAX_ANSWER_BYTES


async def test_what_is_encoded_is_put_into_each_choice_as_it_is(tokenizer: Tokenizer) -> None:
    shared = b'[null,"as it is" ]'
    shape = CompletionFormat(tokenizer)
    choices = [WholeChoice(shape, text=["a"]) for _ in range(3)]
    body = await whole_response(shape, Envelope("id", "model", 0), choices, 3, Usage(), {0: shared})
    assert body.count(shared) == 3
    assert [choice["prompt_logprobs"] for choice in json.loads(body)["choices"]] == [[None, "as it is"]] * 3
