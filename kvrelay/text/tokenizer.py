"""Text to token ids and back, and chat templates, for the model that is served. Works without torch.

Invariant: every known token id has bytes (`token_bytes`), and an unknown one has none. Joined, those of byte-level BPE
and of SentencePiece give the decoded text, but for a space in front that a decoder drops.
"""

import asyncio
import inspect
import json
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import jinja2
import tokenizers

from kvrelay.core.errors import InvalidRequestError, ModelLoadError
from kvrelay.core.model.directory import resolve_model_directory
from kvrelay.core.model.json_object import read_json_object
from kvrelay.core.model.tokenizer_files import refuse_without_tokenizer
from kvrelay.text.chat_message import ChatMessage
from kvrelay.text.made_tokenizer import cannot_be_made, check_made

# Tokenising more characters, decoding more tokens, or rendering more messages, would keep an event loop waiting for too
# long.
LONG_TEXT_CHARS = 8 * 1024
LONG_TEXT_TOKENS = 8 * 1024
LONG_CHAT_MESSAGES = 128
# While it is tokenised, a text takes a hundred times its size in memory: larger ones take turns.
HUGE_TEXT_CHARS = 1024 * 1024

# What a template raises on purpose, or because of what it is given.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)

# The text of a message with which a chat template is tried: no template has it, and what trims texts leaves it alone.
_PROBE = "kvrelayprobe"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_BOUNDARY = "\u2581"  # how SentencePiece writes a space

_logger = logging.getLogger(__name__)


class Tokenizer:
    """The tokenizer of one model. It does not change after loading, apart from its caches, so tasks and threads can
    share it."""

    def __init__(self, hf_tokenizer: Any) -> None:
        backend = hf_tokenizer.backend_tokenizer
        # Some checkpoints have truncation or padding switched on, which would silently change prompts.
        backend.no_truncation()
        backend.no_padding()
        self.backend: tokenizers.Tokenizer = backend
        self._hf = hf_tokenizer
        # What a client may not set for the template, because it has a meaning for the functions that render it.
        parameters = inspect.signature(hf_tokenizer.apply_chat_template).parameters
        self._reserved_variables = {"self", "messages", "conversations", *parameters} - {"kwargs"}
        self._expects_parts = bool(hf_tokenizer.chat_template) and _expects_parts(hf_tokenizer)
        added = backend.get_added_tokens_decoder()
        # What is put before and after a text need not be in the vocabulary.
        self.largest_token_id = max((*backend.get_vocab(with_added_tokens=True).values(), *backend.encode("").ids))
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        decoders = _decoder_types(backend)
        self._byte_of_char = _byte_alphabet() if "ByteLevel" in decoders else None
        self.decodes_bytes = decoders == ["ByteLevel"]  # a text is the bytes of its tokens
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._one_at_a_time = ThreadPoolExecutor(max_workers=1, thread_name_prefix="huge-text")

    @classmethod
    def load(cls, model: str) -> Self:
        """Loads the tokenizer of a model, given as a Hugging Face directory or the name of a cached one, without
        downloading anything. Raises ModelLoadError."""
        directory = resolve_model_directory(model)
        refuse_without_tokenizer(directory)
        has_file = (directory / "tokenizer.json").is_file()
        tokenizer_class = _tokenizer_class(directory)
        try:
            loaded = tokenizer_class.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the libraries raise nothing narrower
            for file in sorted(directory.glob("*token*.json")):
                read_json_object(file)  # names the file if it is the one that is damaged
            if not has_file:
                raise cannot_be_made(directory, str(error)) from error
            raise ModelLoadError(
                f"no tokenizer can be loaded from {directory}: {type(error).__name__}: {error}; fetch the model's "
                "files again, or load them with a version of transformers that knows them"
            ) from error
        if not getattr(loaded, "is_fast", False):
            raise ModelLoadError(
                f"{directory}: {type(loaded).__name__} is no fast tokenizer, and no other is supported"
            )
        if not has_file:
            check_made(loaded.backend_tokenizer, directory)
        return cls(loaded)

    @property
    def vocab_size(self) -> int:
        """Counts the token ids that the tokenizer knows, including added tokens. A model's embedding may be larger."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes a text; a long one in a thread, so that the event loop does not wait, and a huge one after those that
        came before it."""
        if len(text) <= LONG_TEXT_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        encode = partial(self._encode_unlocked, text, add_special_tokens=add_special_tokens)
        threads = self._one_at_a_time if len(text) > HUGE_TEXT_CHARS else None
        return await asyncio.get_running_loop().run_in_executor(threads, encode)

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes a text at once, for callers without an event loop."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _encode_unlocked(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encodes a text as a batch of one: the library lets go of the interpreter's lock for batches only."""
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    async def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation as `render_chat_now` does; a long one in a thread, so that the event loop gets
        its turns."""
        render = partial(
            self.render_chat_now, messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return await asyncio.to_thread(render) if len(messages) > LONG_CHAT_MESSAGES else render()

    def render_chat_now(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation with the model's chat template, which may use `variables`. The text has to be encoded
        without special tokens. The role `developer`, newer OpenAI models' name for `system`, becomes `system`, which
        templates know. A template that expects a list of parts gets each message's text as its only part.

        Raises InvalidRequestError naming `messages` if the model has no template or the template refuses them, and
        naming `chat_template_kwargs` if one of the variables has another meaning."""
        if not self._hf.chat_template:
            raise InvalidRequestError("this model has no chat template: use completions instead", field="messages")
        variables = variables or {}
        for name in variables.keys() & self._reserved_variables:
            raise InvalidRequestError(f"chat_template_kwargs may not have {name}", field="chat_template_kwargs")
        known: list[dict[str, Any]] = [
            {**message, "role": "system"} if message.get("role") == "developer" else dict(message)
            for message in messages
        ]
        if self._expects_parts:
            known = [{**message, "content": _parts(message["content"])} for message in known]
        try:
            text = self._hf.apply_chat_template(
                known, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
            )
        except _TEMPLATE_ERRORS as error:
            refused = "messages and chat_template_kwargs" if variables else "messages"
            raise InvalidRequestError(f"the chat template refused the {refused}: {error}", field="messages") from error
        assert isinstance(text, str)
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def decode_long(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decodes as `decode` does; many tokens in a thread, so that the event loop does not wait."""
        if len(token_ids) <= LONG_TEXT_TOKENS:
            return self.decode(token_ids, skip_special_tokens=skip_special_tokens)
        # As a batch of one, for the reason of `_encode_unlocked`.
        decode = partial(self.backend.decode_batch, [token_ids], skip_special_tokens=skip_special_tokens)
        (text,) = await asyncio.to_thread(decode)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that the token adds to the text; they may be only a part of a character."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._make_token_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Returns the token alone as text, with U+FFFD for bytes that are no character."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", errors="replace")
        return found

    def is_byte_token(self, token_id: int) -> bool:
        """Tells whether the token stands for one byte, which a decoder reads together with those around it."""
        return _BYTE_TOKEN.fullmatch(self.backend.id_to_token(token_id) or "") is not None

    def is_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Tells whether the token is text by itself, with no incomplete character."""
        text = self.decode([token_id], skip_special_tokens=skip_special_tokens)
        return text != "" and "\ufffd" not in text

    @cached_property
    def text_token(self) -> int | None:
        """Some token that is text by itself, neither a byte nor special; None if there is none."""
        others = (token_id for token_id in range(self.largest_token_id + 1) if not self.is_byte_token(token_id))
        return next((token_id for token_id in others if self.is_text(token_id, skip_special_tokens=True)), None)

    def _make_token_bytes(self, token_id: int) -> bytes:
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        # Added tokens are no different: the library decodes them as it does the others.
        if self._byte_of_char is not None:
            if all(char in self._byte_of_char for char in piece):
                return bytes(self._byte_of_char[char] for char in piece)
            return piece.encode()
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_WORD_BOUNDARY, " ").encode()


def _tokenizer_class(path: Path) -> Any:
    """Returns the class that loads this tokenizer. Where there is a tokenizer.json, it says all that is needed.
    AutoTokenizer would take the class that the checkpoint names, and most of those have rules of their own for how a
    text is split in place of the file's: Llama 2's `[` after `<s>`, or a digit after several spaces, would become
    other tokens than in training. It also imports torch, which costs the router seconds and hundreds of megabytes.

    transformers is imported on first use, because that takes a second, and without its advice to install torch.
    """
    logger = logging.getLogger("transformers")

    def not_advice(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(not_advice)
    try:
        if (path / "tokenizer.json").is_file() and not _brings_code(path):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
        from transformers import AutoTokenizer

        return AutoTokenizer
    finally:
        logger.removeFilter(not_advice)


def _brings_code(path: Path) -> bool:
    """Tells whether the checkpoint has a tokenizer class of its own, which AutoTokenizer refuses. Raises
    ModelLoadError."""
    settings = path / "tokenizer_config.json"
    return settings.is_file() and "auto_map" in read_json_object(settings)


def _expects_parts(hf_tokenizer: Any) -> bool:
    """Tells whether the chat template shows the text of a message only if that is in a list of parts: it would take
    each character of a string for a part, and lose the message. Logs a warning if it shows neither; then it gets
    strings."""
    problems: list[str] = []
    for content, form in ((_PROBE, "a string"), (_parts(_PROBE), "a list of parts")):
        try:
            text = hf_tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever it is, the model can be served without its template
            problems.append(f"refuses a user's message that is {form} ({error})")
            continue
        if _PROBE in text.lower():
            return content is not _PROBE
        problems.append(f"leaves out a user's message that is {form}")
    _logger.warning("chats may be refused or lose their text: the model's chat template %s, and %s", *problems)
    return False


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _decoder_types(backend: tokenizers.Tokenizer) -> list[str]:
    """Returns the names of the decoders that the tokenizer applies one after the other."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [decoder["type"] for decoder in state.get("decoders", [state])]


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character in which byte-level BPE writes bytes (Radford 2019): printable Latin-1 bytes
    are themselves, the others are U+0100 and following in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
