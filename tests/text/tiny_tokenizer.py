"""A real byte-level tokenizer, made for the tests."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from kvrelay.text.tokenizer import Tokenizer

CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "hello world, this is a test",
    "Paris is the capital of France",
)
CHAT_TEMPLATE = (
    "{% if style %}<style>{{ style }}\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' and loop.first %}"
    "{{ raise_exception('conversations begin with a user') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Renders what CHAT_TEMPLATE does, and takes a content for a list of parts, as Llama Guard 3 1B's template does.
PARTS_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def backend_tokenizer() -> BackendTokenizer:
    """Makes a byte-level BPE tokenizer. `<s>` is 0 and begins texts, `</s>` is 1. No character outside ASCII has a
    token of its own."""
    tokenizer = BackendTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentencepiece_like(*, byte_fallback: bool = True) -> Tokenizer:
    """Makes a tokenizer with the decoder of Llama 2: spaces are U+2581, unknown characters are byte tokens, and the
    first space is dropped. Without `byte_fallback`, U+FFFD is the only one of those that it knows. `</s>` is the last
    token."""
    fallback = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else ["\ufffd"]
    pieces = ["<unk>", "\u2581hello", "\u2581world", "lo", "\u2581", *fallback]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = BackendTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=byte_fallback))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer))  # type: ignore[no-untyped-call]


def write_tokenizer(directory: Path, *, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes a Hugging Face tokenizer directory and returns it."""
    saved: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend_tokenizer(), bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )
    saved.save_pretrained(str(directory))
    return directory
