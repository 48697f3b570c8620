"""Tokens of named segments, and prompts made of them in the form a server takes.

Invariant: the tokens of a segment are a pure function of vocabulary, seed and name; of two lengths of one name the
shorter is a prefix of the longer. Special tokens are never drawn.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.bench.base import Answer, Prompt, PromptFormat, Segment
from kvrelay.core.errors import ConfigurationError

# Without a tokenizer nobody knows which ids are special; they usually lie among the first ones.
_AVOIDED_IDS = 300


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids that may be drawn, and their text where a tokenizer is there."""

    ids: Sequence[int]
    decode: Callable[[Sequence[int]], str] | None = None

    @classmethod
    def of_size(cls, size: int) -> "Vocabulary":
        return cls(range(min(_AVOIDED_IDS, size // 2), size))

    @classmethod
    def of_tokenizer(cls, name: str) -> "Vocabulary":
        """`name` is a directory with a tokenizer.json, that file, or a Hugging Face name.

        Raises ConfigurationError when there is none.
        """
        # Imported here: with --vocab-size nothing of it is needed.
        from tokenizers import Tokenizer

        path = Path(name)
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigurationError(
                f"--tokenizer: no tokenizer at {name!r} ({error}); give the model's directory or Hugging Face name, or "
                "--vocab-size with --prompt-format token_ids"
            ) from error
        added = set(tokenizer.get_added_tokens_decoder())
        ids = [token_id for token_id in sorted(tokenizer.get_vocab().values()) if token_id not in added]
        return cls(ids, tokenizer.decode)


class PromptBuilder:
    """Prompts of one run, all in one format."""

    def __init__(self, vocabulary: Vocabulary, prompt_format: PromptFormat, *, seed: int) -> None:
        if prompt_format != "token_ids" and vocabulary.decode is None:
            raise ConfigurationError(
                f"prompts as {prompt_format} need a tokenizer: give --tokenizer, or send token ids to a completions "
                "endpoint (--prompt-format token_ids)"
            )
        self._vocabulary = vocabulary
        self._format = prompt_format
        self._seed = seed

    def token_ids(self, segments: Sequence[Segment]) -> list[int]:
        token_ids: list[int] = []
        for segment in segments:
            draw = random.Random(f"{self._seed}/{segment.name}")
            token_ids += draw.choices(self._vocabulary.ids, k=segment.length)
        return token_ids

    def text(self, segments: Sequence[Segment]) -> str:
        """May have a few tokens more or less than asked for: the server says how many."""
        assert self._vocabulary.decode is not None
        return self._vocabulary.decode(self.token_ids(segments))

    def conversation(self, name: str) -> "Conversation":
        """`name` tells its made-up answers from those of others."""
        return Conversation(self, self._format, name)


class Conversation:
    """What one user has said and heard so far. A request of a single turn is a conversation too."""

    def __init__(self, builder: PromptBuilder, prompt_format: PromptFormat, name: str) -> None:
        self._builder = builder
        self._format = prompt_format
        self._name = name
        self._token_ids: tuple[int, ...] = ()
        self._text = ""
        self._messages: tuple[tuple[str, str], ...] = ()
        self._num_answers = 0

    def ask(self, segments: Sequence[Segment]) -> Prompt:
        """All turns until now and one more."""
        if self._format == "token_ids":
            self._token_ids += tuple(self._builder.token_ids(segments))
            return self._token_ids
        text = self._builder.text(segments)
        if self._format == "text":
            self._text += text
            return self._text
        self._messages += (("user", text),)
        return self._messages

    def hear(self, answer: Answer) -> None:
        """The answer becomes part of the next prompt. Where the server sent text but prompts are token ids, made-up
        tokens stand for it: no cache can know those."""
        self._num_answers += 1
        self._text += answer.text
        self._messages += (("assistant", answer.text),)
        if self._format == "token_ids":
            made_up = Segment(f"answer/{self._name}/{self._num_answers}", answer.num_tokens)
            self._token_ids += answer.token_ids or tuple(self._builder.token_ids([made_up]))
