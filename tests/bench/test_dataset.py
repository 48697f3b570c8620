"""Prompts of a data set: sent word for word, in every form, without a tokenizer here."""

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from kvrelay.bench.measure import measure
from kvrelay.bench.plan import plan_warmup, plans_of
from kvrelay.bench.report import render
from kvrelay.bench.result import RunResult
from kvrelay.bench.settings import ServeBenchSettings
from kvrelay.core.errors import ConfigurationError
from tests.bench.servers import DONE, LAST, PIECE, answering, gateway, grpc_router
from tests.router.conftest import relay, tokenizer, tokenizer_directory
from tests.router.edge.edge_parts import ScriptedRelay

__all__ = ["relay", "tokenizer", "tokenizer_directory"]  # fixtures

TEXTS = ["What is the capital of France?", "Zähle  bis 3,\nbitte", "x " * 20 + "\U0001f600"]


def dataset_of(directory: Path, *lines: object) -> Path:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def settings_of(path: Path, **others: Any) -> ServeBenchSettings:
    return ServeBenchSettings(
        workload="dataset", dataset=path, **{"concurrency": 1, "warmup": 0, "progress": "off", **others}
    )


async def result_of(settings: ServeBenchSettings) -> RunResult:
    _, [result] = await measure(settings)
    assert (result.summary.num_completed, result.summary.failures) == (len(result.records), ())
    return result


@pytest.mark.parametrize("serve", [gateway, grpc_router])
async def test_texts_are_sent_word_for_word(
    serve: Callable[[ScriptedRelay], AbstractAsyncContextManager[str]], relay: ScriptedRelay, tmp_path: Path
) -> None:
    path = dataset_of(tmp_path, *({"prompt": text, "output_tokens": 2} for text in TEXTS))
    async with serve(relay) as url:
        result = await result_of(settings_of(path, url=url))
    prompts = [request.prompt_token_ids for request in relay.requests]
    encoded = [await relay.tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    assert prompts == [tuple(token_ids) for token_ids in encoded]
    assert [request.sampling.max_tokens for request in relay.requests] == [2, 2, 2]
    assert result.summary.prompt_tokens == sum(map(len, prompts)) and result.prompt_growth == 1.0


async def test_a_chat_gets_each_text_as_a_message_of_the_user(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = []
    chat = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
    path = dataset_of(tmp_path, *({"prompt": text} for text in TEXTS))
    async with answering([chat, DONE], bodies=bodies) as url:
        await result_of(settings_of(path, url=url, endpoint="chat", output_len="7", ignore_eos=False))
    assert [body["messages"] for body in bodies] == [[{"role": "user", "content": text}] for text in TEXTS]
    assert {body["max_tokens"] for body in bodies} == {7}


async def test_the_table_says_that_a_server_does_not_count_prompt_tokens(tmp_path: Path) -> None:
    async with answering([PIECE, LAST, DONE]) as url:
        result = await result_of(settings_of(dataset_of(tmp_path, {"prompt": "a"}, {"prompt": "b"}), url=url))
    assert "prompt tokens are without those of 2 requests" in render(result, None)


def test_output_lengths_are_those_of_the_lines_or_are_drawn(tmp_path: Path) -> None:
    lines = [{"prompt": str(number)} for number in range(20)]
    path = dataset_of(tmp_path, {"prompt": "a", "output_tokens": 500, "other": 1}, *lines)
    [plan] = plans_of(settings_of(path, output_len="3-9", limit=15))
    requests = [request for session in plan.sessions for request in session.requests]
    assert [one.text for one in requests] == ["a", *map(str, range(14))] and plan.num_requests == 15
    assert requests[0].max_tokens == 500
    assert len({one.max_tokens for one in requests[1:]}) > 3
    assert all(3 <= one.max_tokens <= 9 for one in requests[1:])


def test_they_arrive_at_the_rate(tmp_path: Path) -> None:
    [plan] = plans_of(settings_of(dataset_of(tmp_path, *[{"prompt": "a"}] * 5), request_rate=2.0))
    assert plan.request_rate == 2.0 and plan.sessions[-1].at > plan.sessions[1].at > 0.0


def test_the_warm_up_shares_no_beginning_with_the_prompts(tmp_path: Path) -> None:
    settings = settings_of(dataset_of(tmp_path, {"prompt": "一二三四"}, {"prompt": " ", "output_tokens": 2}), warmup=3)
    [plan] = plans_of(settings)
    warmup = [request for session in plan_warmup(settings, plan).sessions for request in session.requests]
    assert [(one.text, one.max_tokens) for one in warmup] == [("三四一二", 64), (" ", 2), ("三四一二", 64)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "2 is not JSON"),
        (["a"], "2 is not a JSON object"),
        ({"text": "a"}, "2: prompt must be a text, got None"),
        ({"prompt": ""}, "2: prompt must be a text, got ''"),
        ({"prompt": [1, 2]}, "2: prompt must be a text"),
        ({"prompt": "\ud800"}, "2: prompt is no valid text"),
        ({"prompt": "a", "output_tokens": 0}, "2: output_tokens must be a number from 1 on, got 0"),
        ({"prompt": "a", "output_tokens": None}, "2: output_tokens must be a number from 1 on, got None"),
        ({"prompt": "a", "output_tokens": True}, "2: output_tokens must be a number from 1 on, got True"),
    ],
)
def test_the_error_names_the_wrong_line(tmp_path: Path, bad: object, message: str) -> None:
    path = dataset_of(tmp_path, {"prompt": "a"})
    path.write_text(path.read_text() + (bad if isinstance(bad, str) else json.dumps(bad)) + "\n")
    with pytest.raises(ConfigurationError, match=f"--dataset: {path}:{message}"):
        plans_of(settings_of(path))


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--dataset: cannot read"):
        plans_of(settings_of(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match="holds no requests"):
        plans_of(settings_of(dataset_of(tmp_path)))
