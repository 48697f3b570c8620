"""The committed demo model: small, loads as any checkpoint does, answers its questions; its text can be made again."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from demo.corpus import Corpus, Document, Segment
from demo.evaluate import HERE, Examiner, Question, accuracy, load_questions
from demo.vocabulary import encode, pack, train_tokenizer

MODEL_DIR = HERE / "model"
MAX_MODEL_BYTES = 12 * 1024 * 1024
UTF8_SAMPLES = (
    "The capital of France is Paris.",
    "naïve café, Größe, señor",
    "漢字かな交じり文、中文。",
    "emoji: 😀 👩‍👩‍👧 🇫🇷",
    "العربية עברית हिन्दी",
    " two  spaces\n\ttab\r\nline ",
    "\x00\x7f\u200b\ufeff",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(MODEL_DIR))


@pytest.fixture(scope="module")
def examiner() -> Examiner:
    return Examiner(MODEL_DIR, torch.float32)


def test_it_is_small_and_complete() -> None:
    names = {path.name for path in MODEL_DIR.iterdir()}
    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= MAX_MODEL_BYTES


def test_the_weights_are_bfloat16_and_finite() -> None:
    with safe_open(MODEL_DIR / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - not a mapping
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert bool(torch.isfinite(tensor).all()), name


def test_the_configuration_is_a_grouped_query_llama() -> None:
    config: Any = AutoConfig.from_pretrained(str(MODEL_DIR))
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.max_position_embeddings == 4096
    assert config.tie_word_embeddings


def test_it_answers_its_questions(examiner: Examiner) -> None:
    replies = examiner.ask_all(load_questions())
    wrong = [(reply.question.prompt, reply.text) for reply in replies if not reply.right]
    assert accuracy(replies) >= 0.9, wrong


def test_long_answers_end_by_themselves(examiner: Examiner) -> None:
    for prompt in ("Tell me a short story.", "Write about the sea.", "Count to twenty."):
        reply = examiner.ask(Question("chat", prompt, ""), max_new_tokens=300)
        assert reply.ended, prompt
        assert len(reply.token_ids) > 30, prompt


def test_a_prompt_of_two_thousand_tokens_gives_finite_logits() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(str(MODEL_DIR), dtype=torch.float32)
    prompt = torch.arange(2000)[None] % model.config.vocab_size  # [1, 2000]
    with torch.inference_mode():
        assert bool(torch.isfinite(model(input_ids=prompt).logits).all())


@pytest.mark.parametrize("text", UTF8_SAMPLES)
def test_the_tokenizer_gives_any_text_back(tokenizer: Any, text: str) -> None:
    token_ids = tokenizer(text)["input_ids"]
    assert token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text


def test_the_tokenizer_has_a_token_for_every_byte(tokenizer: Any) -> None:
    for value in range(256):
        text = bytes([value]).decode("latin-1")
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.unk_token is None


def test_training_sees_what_the_chat_template_renders(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief and polite."},
        {"role": "user", "content": " What is the capital of Japan?\n"},
        {"role": "assistant", "content": "The capital of Japan is Tokyo."},
        {"role": "user", "content": "And of Italy?"},
        {"role": "assistant", "content": "The capital of Italy is Rome."},
    ]
    document = Document(tuple(Segment(m["role"], m["content"]) for m in messages))  # type: ignore[arg-type]
    rendered = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    trained = encode(tokenizer.backend_tokenizer, document)
    assert [*rendered, tokenizer.eos_token_id] == list(trained.token_ids)
    prompt = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert rendered[: len(prompt)] == prompt
    assert not any(trained.is_target[: len(prompt)])
    assert trained.is_target[len(prompt)]


def test_the_corpus_is_deterministic() -> None:
    once = list(islice(Corpus(7).documents(), 200))
    again = Corpus(7)
    assert [again.document(index) for index in reversed(range(200))] == once[::-1]
    assert list(islice(Corpus(8).documents(), 200)) != once


def test_training_a_tokenizer_twice_gives_the_same_one() -> None:
    one, other = (train_tokenizer(islice(Corpus(0).documents(), 500), 512) for _ in range(2))
    assert one.to_str() == other.to_str()


def test_packed_rows_hold_whole_documents(tokenizer: Any) -> None:
    row_length = 256
    encoded = (encode(tokenizer.backend_tokenizer, document) for document in Corpus(0).documents())
    for row in pack(encoded, row_length, num_rows=3):
        assert 0 < sum(len(document.token_ids) for document in row.documents) <= row_length
        for document in row.documents:
            assert document.token_ids[0] == tokenizer.bos_token_id
            assert document.token_ids[-1] == tokenizer.eos_token_id


def test_the_readme_names_the_committed_size() -> None:
    with safe_open(MODEL_DIR / "model.safetensors", framework="pt") as weights:
        count = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118 - not a mapping
    assert f"{count:,}" in Path(HERE / "README.md").read_text(encoding="utf-8")
