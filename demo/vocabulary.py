"""The demo model's tokenizer: byte-level BPE with chat tokens, and how a document becomes token ids.

Invariant: `encode` yields exactly the ids that the saved chat template and tokenizer give for the same document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from demo.corpus import Document

BOS: Final = "<|bos|>"
EOS: Final = "<|eos|>"
PAD: Final = "<|pad|>"
END: Final = "<|end|>"
SPECIAL_TOKENS: Final[tuple[str, ...]] = (BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>", END)

CHAT_TEMPLATE: Final = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('the demo model knows the roles system, user and assistant') }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|assistant|>' }}"
    "{%- endif %}"
)


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """Token ids of one document and, for each, whether the model is trained to predict it."""

    token_ids: tuple[int, ...]
    is_target: tuple[bool, ...]


def train_tokenizer(documents: Iterable[Document], vocab_size: int) -> Tokenizer:
    """Learns at most `vocab_size` tokens; all 256 bytes are among them, so no text is unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((s.content for d in documents for s in d.segments), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, special_id(tokenizer, BOS))]
    )
    return tokenizer


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a token that `train_tokenizer` puts into every vocabulary."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def as_transformers(tokenizer: Tokenizer, model_max_length: int) -> PreTrainedTokenizerFast:
    """Returns the same tokenizer with the names of its special tokens and the chat template, ready to be saved."""
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in (BOS, EOS, PAD)],
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: Tokenizer, document: Document) -> EncodedDocument:
    """Returns a document's tokens. Plain text is all target; in a chat only what the assistant writes and its end token
    are."""
    token_ids = [special_id(tokenizer, BOS)]
    is_target = [False]
    for segment in document.segments:
        trained = segment.role in ("text", "assistant")
        content = segment.content.strip()
        ids: list[int] = tokenizer.encode(content, add_special_tokens=False).ids
        if segment.role != "text":
            token_ids.append(special_id(tokenizer, f"<|{segment.role}|>"))
            is_target.append(False)
            ids = [*ids, special_id(tokenizer, END)]
        token_ids += ids
        is_target += [trained] * len(ids)
    token_ids.append(special_id(tokenizer, EOS))
    is_target.append(True)
    return EncodedDocument(tuple(token_ids), tuple(is_target))


@dataclass(frozen=True, slots=True)
class Row:
    """Whole documents side by side in one training row, at most `row_length` tokens together."""

    documents: tuple[EncodedDocument, ...]


def pack(documents: Iterator[EncodedDocument], row_length: int, num_rows: int) -> list[Row]:
    """Fills `num_rows` rows first-fit; a document longer than a row is left out."""
    rows: list[list[EncodedDocument]] = [[] for _ in range(num_rows)]
    room = [row_length] * num_rows
    misses = 0
    while misses < num_rows:
        document = next(documents)
        length = len(document.token_ids)
        fitting = next((i for i in range(num_rows) if room[i] >= length), None)
        if fitting is None:
            misses += 1
            continue
        rows[fitting].append(document)
        room[fitting] -= length
    return [Row(tuple(row)) for row in rows]
