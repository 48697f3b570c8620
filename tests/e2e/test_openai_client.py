"""The official Python client, unmodified, against the real gateway."""

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.cluster import Cluster, Oracle

pytestmark = pytest.mark.timeout(120)

PROMPT = "The capital of France is"
NO_END = {"ignore_eos": True}
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    base_url = f"http://{cluster.router.http}/v1"
    with openai.OpenAI(base_url=base_url, api_key="not checked", max_retries=0, timeout=30.0) as client:
        yield client


@pytest.fixture
def name(cluster: Cluster) -> str:
    return cluster.router.model


def test_the_served_model_is_listed(client: openai.OpenAI, name: str) -> None:
    assert [model.id for model in client.models.list()] == [name]
    assert client.models.retrieve(name).owned_by == "kvrelay"


def test_a_completion_has_transformers_text_and_usage(client: openai.OpenAI, name: str, oracle: Oracle) -> None:
    answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=16, temperature=0, extra_body=NO_END)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == (oracle.text(PROMPT, 16), "length")
    assert "Paris" in choice.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(oracle.encode(PROMPT))
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16


def test_a_streamed_completion_adds_up_to_transformers_text(client: openai.OpenAI, name: str, oracle: Oracle) -> None:
    stream = client.completions.create(
        model=name,
        prompt=PROMPT,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=NO_END,
    )
    chunks = list(stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == oracle.text(PROMPT, 8)
    assert len([choice for choice in choices if choice.text]) > 1
    assert choices[-1].finish_reason == "length"
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None] == [8]


def test_a_chat_is_answered_and_ends_by_itself(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(model=name, messages=QUESTION, max_tokens=32, temperature=0)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert "Tokyo" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens > 1


def test_a_streamed_chat_adds_up_to_the_whole_answer(client: openai.OpenAI, name: str) -> None:
    whole = client.chat.completions.create(model=name, messages=QUESTION, max_tokens=32, temperature=0)
    stream = client.chat.completions.create(model=name, messages=QUESTION, max_tokens=32, temperature=0, stream=True)
    choices = [choice for chunk in stream for choice in chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content
    assert choices[-1].finish_reason == "stop"


def test_two_choices_are_seeded(client: openai.OpenAI, name: str) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(
            model=name, prompt="Once upon a time", n=2, max_tokens=24, temperature=1.5, seed=11
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [choice.text for choice in answer.choices]

    first = texts()
    assert first[0] != first[1]
    assert texts() == first


def test_both_choices_of_a_streamed_chat_finish(client: openai.OpenAI, name: str) -> None:
    stream = client.chat.completions.create(model=name, messages=QUESTION, n=2, max_tokens=8, seed=1, stream=True)
    finished = [choice.index for chunk in stream for choice in chunk.choices if choice.finish_reason]
    assert sorted(finished) == [0, 1]


def test_logprobs_of_a_completion_equal_transformers(client: openai.OpenAI, name: str, oracle: Oracle) -> None:
    answer = client.completions.create(
        model=name, prompt=PROMPT, max_tokens=3, temperature=0, logprobs=2, extra_body=NO_END
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.token_logprobs is not None
    assert "".join(found.tokens) == oracle.text(PROMPT, 3)
    assert found.token_logprobs == pytest.approx(oracle.logprobs(PROMPT, 3), abs=1e-3)
    assert found.top_logprobs is not None and all(len(top) >= 2 for top in found.top_logprobs)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_given_text_is_rated_as_it_was_generated(
    client: openai.OpenAI, name: str, oracle: Oracle, max_tokens: int
) -> None:
    """As lm-evaluation-harness asks for the log-likelihood of a continuation."""
    rated = PROMPT + oracle.text(PROMPT, 3)
    for prompt in (rated, oracle.encode(rated)):
        answer = client.completions.create(
            model=name, prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=1, echo=True, seed=1234
        )
        found = answer.choices[0].logprobs
        assert found is not None and found.token_logprobs is not None and found.top_logprobs is not None
        first = len(oracle.encode(PROMPT))
        end = len(found.token_logprobs) - max_tokens
        assert end == first + 3
        assert found.token_logprobs[first:end] == pytest.approx(oracle.logprobs(PROMPT, 3), abs=1e-3)
        greedy = [max(top.values()) for top in found.top_logprobs[first:end] if top]
        assert found.token_logprobs[first:end] == greedy, "of the likeliest tokens it is exactly the same number"
        assert answer.usage is not None and answer.usage.completion_tokens == max_tokens


def test_logprobs_of_a_chat_spell_its_message(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(
        model=name, messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None
    assert "".join(entry.token for entry in found.content) == answer.choices[0].message.content
    for entry in found.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob, "greedy takes the likeliest"
        assert bytes(entry.bytes or []).decode(errors="replace") == entry.token


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_of_a_stop_string_is_shown(client: openai.OpenAI, name: str, oracle: Oracle, stream: bool) -> None:
    """The stop string begins inside one token and ends in another."""
    first, whole = oracle.text(PROMPT, 4), oracle.text(PROMPT, 16)
    stop = whole[len(first) - 1 : len(first) + 2]
    answer = client.completions.create(
        model=name, prompt=PROMPT, max_tokens=16, temperature=0, stop=[stop], stream=stream, extra_body=NO_END
    )
    chunks = list(answer) if isinstance(answer, openai.Stream) else [answer]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_text_of_any_script_comes_back_unchanged(client: openai.OpenAI, name: str) -> None:
    for text in ("東京は日本の首都です。", "🐈‍⬛👩‍👩‍👧 ", "Ünïcödé ßtraße", "a\u0000b"):
        completion = client.completions.create(model=name, prompt=text, max_tokens=4, echo=True)
        assert completion.choices[0].text.startswith(text)
        chat = client.chat.completions.create(model=name, messages=[{"role": "user", "content": text}], max_tokens=4)
        assert chat.choices[0].message.content is not None


def test_refusals_become_the_clients_exceptions(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.completions.create(model="gpt-5", prompt="Hello")
    with pytest.raises(openai.BadRequestError, match="temperature") as raised:
        client.completions.create(model=name, prompt="Hello", temperature=-1)
    assert raised.value.param == "temperature"
