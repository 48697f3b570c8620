"""Tokens of named segments, and prompts made of them in the form that a server takes.

Invariant: the tokens of a segment are a pure function of vocabulary, seed and name; of two segments with the same name
the shorter one is a prefix of the longer. Special tokens are never drawn.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.bench.base import Answer, Prompt, PromptFormat, Segment
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.model.directory import resolve_model_directory

# Without a tokenizer nobody knows which ids are special; they usually lie among the first ones.
_AVOIDED_IDS = 300
_PIECE_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids that may be drawn, and how they become text if there is a tokenizer."""

    ids: Sequence[int]
    decode: Callable[[Sequence[int]], str] | None = None

    @classmethod
    def of_size(cls, size: int) -> "Vocabulary":
        return cls(range(min(_AVOIDED_IDS, size // 2), size))

    @classmethod
    def of_tokenizer(cls, name: str) -> "Vocabulary":
        """Loads a tokenizer. `name` is a directory with a tokenizer.json, that file, or the name of a model in the
        Hugging Face cache. Downloads nothing. Raises ConfigurationError when there is none."""
        # Imported here because --vocab-size does without it.
        from tokenizers import Tokenizer

        try:
            file = Path(name) if Path(name).is_file() else resolve_model_directory(name) / "tokenizer.json"
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigurationError(
                f"--tokenizer: no tokenizer at {name!r} ({error}); give a model's directory or name, or --vocab-size "
                "with --prompt-format token_ids"
            ) from error
        added = set(tokenizer.get_added_tokens_decoder())
        ids = [token_id for token_id in sorted(tokenizer.get_vocab().values()) if token_id not in added]
        return cls(ids, tokenizer.decode)


class PromptBuilder:
    """The maker of a run's prompts, all in one format. It needs no vocabulary for those that are given."""

    def __init__(self, vocabulary: Vocabulary | None, prompt_format: PromptFormat, *, seed: int) -> None:
        if prompt_format != "token_ids" and vocabulary is not None and vocabulary.decode is None:
            raise ConfigurationError(
                f"prompts as {prompt_format} need a tokenizer: give --tokenizer, or send token ids to a completions "
                "endpoint (--prompt-format token_ids)"
            )
        self._vocabulary = vocabulary
        self._format = prompt_format
        self._seed = seed

    def pieces(self, segments: Sequence[Segment]) -> Iterator[list[int]]:
        """Yields the tokens of the segments in pieces that take well under a millisecond each to draw."""
        assert self._vocabulary is not None
        for segment in segments:
            draw = random.Random(f"{self._seed}/{segment.name}")
            for begin in range(0, segment.length, _PIECE_TOKENS):
                yield draw.choices(self._vocabulary.ids, k=min(_PIECE_TOKENS, segment.length - begin))

    def token_ids(self, segments: Sequence[Segment]) -> list[int]:
        return list(itertools.chain.from_iterable(self.pieces(segments)))

    def text_pieces(self, segments: Sequence[Segment]) -> Iterator[str]:
        """Yields the text of each piece. A server may count a few tokens more or less than were drawn."""
        assert self._vocabulary is not None and self._vocabulary.decode is not None
        yield from map(self._vocabulary.decode, self.pieces(segments))

    def given(self, text: str) -> Prompt:
        """Returns a prompt of exactly this text."""
        return (("user", text),) if self._format == "chat" else text

    def conversation(self, name: str) -> "Conversation":
        """Returns an empty conversation. Its made-up answers are drawn by `name`."""
        return Conversation(self, self._format, name)


class Conversation:
    """All that one user has said and heard so far. A request of a single turn is a conversation too."""

    def __init__(self, builder: PromptBuilder, prompt_format: PromptFormat, name: str) -> None:
        self._builder = builder
        self._format = prompt_format
        self._name = name
        self._token_ids: list[int] = []
        self._text = ""
        self._messages: tuple[tuple[str, str], ...] = ()
        self._num_answers = 0

    async def ask(self, segments: Sequence[Segment]) -> Prompt:
        """Adds one turn and returns all turns so far. Yields to the loop after every piece that it has drawn."""
        if self._format == "token_ids":
            for token_ids in self._builder.pieces(segments):
                self._token_ids += token_ids
                await asyncio.sleep(0)
            return tuple(self._token_ids)
        texts: list[str] = []
        for text in self._builder.text_pieces(segments):
            texts.append(text)
            await asyncio.sleep(0)
        if self._format == "text":
            self._text += "".join(texts)
            return self._text
        self._messages += (("user", "".join(texts)),)
        return self._messages

    def hear(self, answer: Answer) -> None:
        """Makes the answer part of the next prompt. Where the server sent text but prompts are token ids, made-up
        tokens stand for it, which no server's cache can hold."""
        self._num_answers += 1
        self._text += answer.text
        self._messages += (("assistant", answer.text),)
        if self._format == "token_ids":
            made_up = Segment(f"answer/{self._name}/{self._num_answers}", answer.num_tokens)
            self._token_ids += answer.token_ids or self._builder.token_ids([made_up])
