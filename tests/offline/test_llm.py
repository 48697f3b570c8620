"""The offline API on the demo model, compared with transformers' `generate`."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from paged_kernels.cpu.threads import num_threads, threads_kept

import kvrelay
from bench.random_model import PAD_TOKEN, PAD_TOKEN_ID, write_byte_tokenizer
from kvrelay import LLM, SamplingParams
from kvrelay.core.errors import InvalidRequestError, KVRelayError, ModelLoadError
from kvrelay.engine import startup
from kvrelay.engine.cpu.runner import ComputedStep, CpuRunner
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.step_result import StepResult
from kvrelay.offline.prompts import Prompt
from tests.demo_model import DEMO_MODEL
from tests.e2e.cluster import some_token_ids
from tests.engine.reference import Reference
from tests.engine.tiny_models import make_tiny_model
from tests.text.tiny_tokenizer import PARTS_TEMPLATE

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["The capital of France is", "Water freezes at", "A week has"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(DEMO_MODEL), dtype="float32", threads=1, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=32)


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Any:
    yield
    llm._engine.check_idle()


def test_greedy_tokens_are_those_of_transformers(llm: LLM) -> None:
    reference = Reference(DEMO_MODEL)
    prompts: list[str | list[int]] = [*PROMPTS, some_token_ids(100, seed=1), some_token_ids(1, seed=2)]
    results = llm.generate(prompts, replace(GREEDY, ignore_eos=True), progress=False)
    assert len(results) == len(prompts)
    for prompt, result in zip(prompts, results, strict=True):
        [output] = result.outputs
        assert list(output.token_ids) == reference.generate(list(result.prompt_token_ids), 12)
        assert result.prompt == (prompt if isinstance(prompt, str) else None)
        assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)


def test_more_prompts_than_run_at_a_time_give_the_tokens_of_each_alone(llm: LLM) -> None:
    prompts: list[str | list[int]] = [some_token_ids(60 + number, seed=number) for number in range(24)]
    together = llm.generate(prompts, GREEDY, progress=False)
    assert [one.outputs[0].token_ids for one in together] == [
        llm.generate(prompt, GREEDY, progress=False)[0].outputs[0].token_ids for prompt in prompts
    ]


def test_one_prompt_and_no_prompts_are_accepted(llm: LLM) -> None:
    assert len(llm.generate("The capital of France is", GREEDY, progress=False)) == 1
    assert len(llm.generate([5, 6, 7], GREEDY, progress=False)) == 1
    assert llm.generate([], progress=False) == []


def test_every_prompt_can_have_its_own_sampling(llm: LLM) -> None:
    sampling = [replace(GREEDY, max_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
    results = llm.generate(PROMPTS, sampling, progress=False)
    assert [len(one.outputs[0].token_ids) for one in results] == [1, 2, 3]
    assert [one.outputs[0].finish_reason for one in results] == ["length"] * 3


def test_a_seed_decides_the_tokens_alone_or_in_a_batch(llm: LLM) -> None:
    sampling = SamplingParams(seed=7, n=3, max_tokens=10, ignore_eos=True)
    [alone] = llm.generate(PROMPTS[0], sampling, progress=False)
    batch = llm.generate(PROMPTS, sampling, progress=False)
    assert alone.outputs == batch[0].outputs
    assert len({output.token_ids for output in alone.outputs}) > 1
    assert [output.index for output in alone.outputs] == [0, 1, 2]


def test_top_k_and_seed_may_be_what_they_are_over_http(llm: LLM) -> None:
    drawn = [
        llm.generate(PROMPTS[0], SamplingParams(seed=seed, top_k=top_k), progress=False)[0].outputs
        for seed, top_k in ((-7, -1), (2**64 - 7, 0))
    ]
    assert drawn[0] == drawn[1]
    for sampling in (SamplingParams(seed=-(2**63) - 1), SamplingParams(top_k=-2)):
        with pytest.raises(InvalidRequestError, match=r"prompt 0: (seed|top_k) must be"):
            llm.generate(PROMPTS[0], sampling, progress=False)


def test_stop_strings_end_an_output(llm: LLM) -> None:
    [result] = llm.generate(PROMPTS[0], replace(GREEDY, stop=("France",)), progress=False)
    [output] = result.outputs
    assert (output.text, output.finish_reason, output.stop_reason) == (" Paris. ", "stop", "France")


def test_an_output_that_a_stop_string_has_ended_is_not_computed_further(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, computed = llm._engine.step, 0

    def counted() -> tuple[StepResult | None, bool]:
        nonlocal computed
        result, busy = step()
        computed += sum(len(item.output.token_ids) for item in result.outputs) if result is not None else 0
        return result, busy

    monkeypatch.setattr(llm._engine, "step", counted)
    sampling = SamplingParams(n=4, seed=1, temperature=2.0, max_tokens=40, ignore_eos=True, stop="e")
    [result] = llm.generate(PROMPTS[0], sampling, progress=False)
    lengths = [len(output.token_ids) for output in result.outputs]
    assert len(set(lengths)) > 1 and computed == sum(lengths)


def test_one_stop_string_may_be_given_as_such(llm: LLM) -> None:
    [result] = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, stop="France"), progress=False)
    assert (result.outputs[0].text, result.outputs[0].stop_reason) == (" Paris. ", "France")


def test_a_mapping_of_biases_is_applied(llm: LLM) -> None:
    [result] = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, logit_bias={7: 100.0}), progress=False)
    assert set(result.outputs[0].token_ids) == {7}


def test_numbers_of_any_type_are_sampled_with(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.5, top_p=0.5, seed=3, max_tokens=8, logit_bias={7: 1.5})
    others: dict[str, Any] = {
        "temperature": Fraction(1, 2),
        "top_p": np.float16(0.5),
        "seed": np.uint8(3),
        "max_tokens": np.uint8(8),
        "logit_bias": {np.int64(7): Fraction(3, 2)},
    }
    [first], [second] = (llm.generate(PROMPTS[0], one, progress=False) for one in (plain, SamplingParams(**others)))
    assert first.outputs == second.outputs


def test_quantised_weights_still_answer_and_name_their_kv_otherwise(llm: LLM) -> None:
    int8 = LLM(str(DEMO_MODEL), quantization="int8", threads=1, num_blocks=16, max_num_seqs=1)
    [result] = int8.generate(PROMPTS[0], GREEDY, progress=False)
    assert result.outputs[0].text.startswith(" Paris")
    assert int8._engine._namespace.model_fingerprint != llm._engine._namespace.model_fingerprint


def test_logprobs_cover_the_output_and_the_prompt_as_asked(llm: LLM) -> None:
    sampling = replace(GREEDY, logprobs=2, prompt_logprobs=1, max_tokens=3)
    [result] = llm.generate([some_token_ids(20, seed=3)], sampling, progress=False)
    [output] = result.outputs
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
    assert [entry.token_id for entry in result.prompt_logprobs] == list(result.prompt_token_ids[1:])
    assert all(entry.rank == 1 and len(entry.top) == 2 for entry in output.logprobs)


def test_a_known_prefix_is_not_computed_again(llm: LLM) -> None:
    prompt = some_token_ids(50, seed=4)
    llm.generate(prompt, GREEDY, progress=False)
    assert llm.generate(prompt, GREEDY, progress=False)[0].num_cached_tokens == 48


def test_chat_applies_the_template_to_one_conversation_or_several(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of Italy?"}]
    sampling = replace(GREEDY, max_tokens=16)
    [one] = llm.chat(question, sampling, progress=False)
    assert one.outputs[0].text == "The capital of Italy is Rome."
    assert one.prompt is not None
    assert list(one.prompt_token_ids) == llm.tokenizer.encode_now(one.prompt, add_special_tokens=False)
    assert [each.outputs for each in llm.chat([question, question], sampling, progress=False)] == [one.outputs] * 2
    with pytest.raises(InvalidRequestError, match="not both at once"):
        llm.chat([*question, question], sampling, progress=False)  # type: ignore[arg-type]


def test_a_message_may_have_parts_and_a_system_message_be_called_developer(llm: LLM) -> None:
    question = "What is the capital of Italy?"
    parts = [{"type": "text", "text": "What is the capital"}, {"type": "text", "text": "of Italy?"}]
    [of_parts] = llm.chat([{"role": "user", "content": parts}], GREEDY, progress=False)
    assert of_parts.prompt is not None and question.replace(" of", "\nof") in of_parts.prompt
    roles = ("system", "developer")
    system, developer = (
        llm.chat([{"role": role, "content": "Be brief."}, {"role": "user", "content": question}], progress=False)[0]
        for role in roles
    )
    assert system.prompt == developer.prompt


def test_a_template_that_expects_parts_gets_them(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path, with_tokenizer=True)
    (tmp_path / "chat_template.jinja").write_text(PARTS_TEMPLATE)
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    [result] = LLM(tmp_path, threads=1, num_blocks=8, max_model_len=64).chat(chat, GREEDY, progress=False)
    assert result.prompt == "<system>be brief\n<user>hello\n<assistant>"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages must be a list of messages"),
        (["hello"], "messages must be a list of messages"),
        ([object()], "prompt 0: messages must be a list of messages"),
        ([iter([{"role": "user", "content": "hello"}])], "prompt 0: messages must be a list of messages"),
        ([[]], "prompt 0: messages must be a list of messages"),
        ([[{"role": "user", "content": "hello"}], [{"role": "user"}]], r"prompt 1: messages\[0\]: content must be"),
        ([[{"role": "user", "content": "hello"}], [{"role": "no", "content": ""}]], r"prompt 1: messages\[0\]\.role "),
        ([{"role": "user", "content": "hello", "tool_calls": [{}]}], r"0: messages\[0\]: tool_calls is not supported"),
        ([{"content": "hello"}], r"messages\[0\] has no role"),
        ([{"role": "user"}], r"messages\[0\]: content must be a string or a list of text parts"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] must be a part of type text"),
    ],
)
def test_a_conversation_that_is_none_is_refused(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        llm.chat(messages, GREEDY, progress=False)
    assert caught.value.field == "messages"


def test_a_model_that_is_not_here_is_named() -> None:
    with pytest.raises(ModelLoadError, match="nobody/nothing is neither a directory nor a model"):
        LLM("nobody/nothing")


def test_a_folder_that_is_no_model_is_not_told_that_it_lacks_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model-q4.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"has no config\.json, but model-q4\.gguf: GGUF is not"):
        LLM(tmp_path)


def test_max_tokens_is_lowered_to_what_the_model_can_do(llm: LLM) -> None:
    sampling = replace(GREEDY, max_tokens=10**6, ignore_eos=True)
    [result] = llm.generate(some_token_ids(llm.max_model_len - 4, seed=5), sampling, progress=False)
    assert len(result.outputs[0].token_ids) == 4


@pytest.mark.parametrize("form", [list, tuple, np.array, torch.tensor, lambda ids: {"prompt_token_ids": ids}])
def test_token_ids_may_be_a_list_a_tuple_an_array_a_tensor_or_in_a_mapping(
    llm: LLM, form: Callable[[list[int]], Any]
) -> None:
    token_ids = some_token_ids(9, seed=6)
    [expected] = llm.generate([token_ids], GREEDY, progress=False)
    for prompts in (form(token_ids), [form(token_ids)]):
        [result] = llm.generate(prompts, GREEDY, progress=False)
        assert (result.prompt_token_ids, result.outputs) == (expected.prompt_token_ids, expected.outputs)
    mixed: list[Prompt] = ["hello", {"prompt": "hello"}]
    text, same = llm.generate(mixed, GREEDY, progress=False)
    assert (text.prompt, text.outputs) == (same.prompt, same.outputs)


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        (["fine", ""], replace(GREEDY, n=0), "n must be between"),
        ([[1, 10**9]], GREEDY, "prompt 0: token id 1000000000 is outside the vocabulary"),
        (["fine", []], GREEDY, "prompt 1 has no tokens"),
        (["fine", "\ud83d"], GREEDY, "prompt 1 is not valid Unicode"),
        (["one", "two"], [GREEDY, replace(GREEDY, top_p=2.0)], "prompt 1: top_p must be in"),
        (["one", "two"], [GREEDY, replace(GREEDY, n=9)], r"prompt 1: n is 9, but at most 8 .*\(max_num_seqs\)"),
        (["fine", 3.5], GREEDY, "prompt 1 is neither a text nor a list of token ids"),
        ([[5, True]], GREEDY, "prompt 0 is neither a text nor a list of token ids"),
        (["fine", b"fine"], GREEDY, "prompt 1 is neither a text nor a list of token ids"),
        (["fine", {"text": "fine"}], GREEDY, "prompt 1 must have either prompt or prompt_token_ids, and has text"),
        ({"prompt": "a", "prompt_token_ids": [5]}, GREEDY, "prompt 0 must have .* has prompt, prompt_token_ids"),
        ([{"prompt_token_ids": "fine"}], GREEDY, "prompt 0: prompt_token_ids has the wrong type"),
        ([{"prompt": [5]}], GREEDY, "prompt 0: prompt has the wrong type"),
        ("one", SamplingParams(ignore_eos="no"), "prompt 0: ignore_eos must be true or false, got 'no'"),  # type: ignore[arg-type]
        (None, GREEDY, "prompts must be a prompt or a list of them, got None"),
        (b"fine", GREEDY, "prompts must be a prompt or a list of them, got b'fine'"),
        (np.array(5), GREEDY, r"prompts must be a prompt or a list of them, got array\(5\)"),
        (["fine", torch.tensor(5)], GREEDY, "prompt 1 is neither a text nor a list of token ids"),
        ("one", replace(GREEDY, logprobs=True), "prompt 0: logprobs must be an integer or None, got True"),
        ("one", {"max_tokens": 5}, "sampling_params must be a SamplingParams or a list of them, got {"),
        (["one", "two"], [GREEDY, None], "sampling_params must be .* or a list of them, got None for prompt 1$"),
        ([[5] * 100_000], GREEDY, "prompt 0 has 100000 tokens"),
        (["one", "two"], [GREEDY], "1 sampling_params for 2 prompts"),
        (["one"], replace(GREEDY, n=9), r"prompt 0: n is 9, but at most 8 .*\(max_num_seqs\)"),
        (["one"], SamplingParams(max_tokens=None), "max_tokens must be an integer, got None"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_says_what_is_wrong_and_the_next_call_works(
    llm: LLM, prompts: Any, sampling: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, sampling, progress=False)
    assert llm.generate("fine", GREEDY, progress=False)


def test_a_conversation_that_can_not_run_is_named_with_the_field(llm: LLM) -> None:
    fine, half, long = ([{"role": "user", "content": text}] for text in ("fine", "\ud83d", "long " * 5000))
    for wrong, message in ((half, "prompt 1 is not valid Unicode"), (long, r"prompt 1 has \d+ tokens")):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            llm.chat([fine, wrong], GREEDY, progress=False)
        assert caught.value.field == "messages"


def test_a_text_may_not_have_tokens_that_only_the_tokenizer_knows(tmp_path: Path) -> None:
    write_byte_tokenizer(make_tiny_model("llama", tmp_path, vocab_size=PAD_TOKEN_ID), vocab_size=320)
    small = LLM(tmp_path, threads=1, num_blocks=4, max_model_len=64)
    message = f"prompt 1: token id {PAD_TOKEN_ID} is outside the vocabulary of {PAD_TOKEN_ID}"
    with pytest.raises(InvalidRequestError, match=message) as caught:
        small.generate(["fine", f"fine {PAD_TOKEN}"], GREEDY, progress=False)
    assert caught.value.field == "prompts"
    with pytest.raises(InvalidRequestError, match=message) as caught:
        small.chat([[{"role": "user", "content": text}] for text in ("fine", PAD_TOKEN)], GREEDY, progress=False)
    assert caught.value.field == "messages"
    assert small.generate("fine", GREEDY, progress=False)
    small._engine.check_idle()


@pytest.mark.parametrize(
    ("dtype", "threads", "during"),
    [("bfloat16", 2, (2, 1)), ("bfloat16", 0, (3, 1)), ("float32", 2, (2, 2))],
)
def test_the_caller_keeps_its_numbers_of_threads(
    dtype: Literal["bfloat16", "float32"], threads: int, during: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That holds for the threads of the kernels and of torch, which gets a single one if the kernels multiply."""
    seen = set()
    launch = CpuRunner.launch

    def watched(self: CpuRunner, plan: SchedulerOutput) -> ComputedStep:
        seen.add((num_threads(), torch.get_num_threads()))
        return launch(self, plan)

    monkeypatch.setattr(CpuRunner, "launch", watched)
    monkeypatch.setattr(startup, "available_cores", lambda: 4)
    with threads_kept():
        torch.set_num_threads(3)
        llm = LLM(str(DEMO_MODEL), dtype=dtype, threads=threads, num_blocks=64)
        for _ in range(2):
            llm.generate("A week has", GREEDY, progress=False)
            assert num_threads() == torch.get_num_threads() == 3
    assert seen == {during}


def test_a_bar_shows_progress(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr()
    assert "3/3" in shown.err and "output tokens/s" in shown.err
    assert shown.out == ""


def test_the_package_lists_its_names_and_knows_no_others() -> None:
    assert set(kvrelay.__all__) <= set(dir(kvrelay))
    with pytest.raises(AttributeError, match="module 'kvrelay' has no attribute 'SamplingParam'"):
        _ = kvrelay.SamplingParam  # type: ignore[attr-defined]  # mypy reports an ignore that it does not need


def test_importing_the_package_does_not_import_torch() -> None:
    code = (
        "import kvrelay, sys; kvrelay.SamplingParams(), kvrelay.KVRelayError; assert 'torch' not in sys.modules; "
        "[getattr(kvrelay, name) for name in kvrelay.__all__]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("torch", "ImportError: LLM needs torch: pip install 'kvrelay[engine]'"), ("else", "No module named 'else'")],
)
def test_an_import_that_fails_names_the_extra_only_if_it_helps(tmp_path: Path, missing: str, message: str) -> None:
    (tmp_path / "tqdm.py").write_text(f"raise ModuleNotFoundError(\"No module named '{missing}'\", name='{missing}')\n")
    ended = subprocess.run(
        [sys.executable, "-c", "from kvrelay import LLM"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ended.stderr.splitlines()[-1].endswith(message)


def test_chunks_smaller_than_a_block_give_the_same_tokens() -> None:
    """A step that fills no block and ends no prompt has no result, but is not the end."""
    small = LLM(str(DEMO_MODEL), dtype="float32", threads=1, num_blocks=8, block_size=64, max_num_batched_tokens=16)
    prompt = some_token_ids(60, seed=1)
    [result] = small.generate(prompt, replace(GREEDY, ignore_eos=True), progress=False)
    assert list(result.outputs[0].token_ids) == Reference(DEMO_MODEL).generate(prompt, 12)


def test_a_second_thread_is_refused_while_a_batch_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm._engine.step
    refused: list[BaseException | None] = []

    def first() -> tuple[StepResult | None, bool]:
        monkeypatch.setattr(llm._engine, "step", step)
        with ThreadPoolExecutor() as threads:
            refused.append(threads.submit(llm.generate, PROMPTS[1], GREEDY, progress=False).exception())
        return step()

    monkeypatch.setattr(llm._engine, "step", first)
    [result] = llm.generate(PROMPTS[0], GREEDY, progress=False)
    assert result.outputs[0].text.startswith(" Paris")
    assert isinstance(refused[0], KVRelayError) and "one thread at a time" in str(refused[0])
    with ThreadPoolExecutor() as threads:
        alone = threads.submit(llm.generate, PROMPTS[0], GREEDY, progress=False)
    assert alone.result()[0].outputs == result.outputs
