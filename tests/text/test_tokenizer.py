"""The tokenizer of a model directory: long texts, the bytes of tokens, and directories without one."""

from pathlib import Path

import pytest

from kvrelay.core.errors import ModelLoadError
from kvrelay.text.tokenizer import LONG_TEXT_CHARS, Tokenizer


async def test_long_text_is_encoded_like_short_text(tokenizer: Tokenizer) -> None:
    text = "hello world " * LONG_TEXT_CHARS
    token_ids = await tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text


async def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    text = "hello 你好 \U0001f389"
    token_ids = await tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == text
    assert tokenizer.token_text(1) == "</s>"
    assert tokenizer.token_bytes(10**6) == b""


def test_a_directory_without_a_tokenizer_is_a_model_load_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        Tokenizer.load(str(tmp_path))
    with pytest.raises(ModelLoadError, match="neither a directory nor a model in the local Hugging Face cache"):
        Tokenizer.load(str(tmp_path / "absent"))
    with pytest.raises(ModelLoadError, match="the model's name is empty"):
        Tokenizer.load("")
