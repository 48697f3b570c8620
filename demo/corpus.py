"""The training text: an endless, seeded stream of documents made from the tables and templates.

Invariant: document number i of a seed is always the same, whatever was drawn before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Final, Literal

from demo import stories
from demo.chat_requests import Exchange, introduction, rephrased, story_request, unknown_request, writing_request
from demo.topics import Fact, all_facts

Role = Literal["text", "system", "user", "assistant"]

SYSTEM_PROMPTS: Final[tuple[str, ...]] = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in a short sentence.",
    "You are the kvrelay demo model.",
    "Answer the questions of the user.",
    "Be brief and polite.",
    "You are a helpful AI assistant that answers truthfully.",
)
MAX_PLAIN_STATEMENTS: Final = 6
MAX_TURNS: Final = 4


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of text by one speaker; `text` is a plain document without speakers."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Document:
    """One plain text, or a chat of an optional system segment and user/assistant pairs."""

    segments: tuple[Segment, ...]


class Corpus:
    """The stream of documents. It holds only the facts; every document has a random generator of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._facts: dict[str, tuple[Fact, ...]] = {}
        self._topics: list[str] = []
        self._shares: list[float] = []
        for topic, (share, facts) in all_facts().items():
            self._topics.append(topic)
            self._shares.append(share)
            self._facts[topic] = facts

    def document(self, index: int) -> Document:
        """Returns document number `index`: about a third are plain text, two thirds are chats."""
        rng = Random(f"{self._seed}:{index}")  # a string seed is hashed with SHA-512, equal on every machine
        kind = rng.random()
        if kind < 0.30:
            return _plain(self._statements(rng))
        if kind < 0.34:
            return _plain(self._question_list(rng))
        if kind < 0.37:
            return _plain(_long_text(rng))
        return self._chat(rng)

    def documents(self) -> Iterator[Document]:
        """Yields all documents, without an end."""
        return map(self.document, count())

    def _fact(self, rng: Random, topic: str | None = None) -> Fact:
        return rng.choice(self._facts[topic or rng.choices(self._topics, self._shares)[0]])

    def _statements(self, rng: Random) -> str:
        topic = rng.choices(self._topics, self._shares)[0] if rng.random() < 0.5 else None
        count = rng.choice((1, 1, 1, 2, 3, MAX_PLAIN_STATEMENTS))
        sentences = [rng.choice(self._fact(rng, topic).statements) for _ in range(count)]
        text = " ".join(s if s[-1] in ".!?" or count == 1 else s + "." for s in sentences)
        return _with_lower_case_start(text) if count == 1 and rng.random() < 0.12 else text

    def _question_list(self, rng: Random) -> str:
        ask_mark, reply_mark = rng.choice((("Question", "Answer"), ("Q", "A")))
        pairs = [self._exchange(rng) for _ in range(rng.randint(1, 4))]
        return "\n".join(f"{ask_mark}: {ask}\n{reply_mark}: {reply}" for ask, reply in pairs)

    def _exchange(self, rng: Random) -> Exchange:
        asks, reply = rng.choice(self._fact(rng).exchanges)
        return rephrased(rng, rng.choice(asks)), reply

    def _chat(self, rng: Random) -> Document:
        segments: list[Segment] = []
        if rng.random() < 0.25:
            segments.append(Segment("system", self._system_prompt(rng)))
        count = rng.choice((1, 1, 1, 2, 3, MAX_TURNS))
        for ask, reply in self._turns(rng, count):
            segments += (Segment("user", ask), Segment("assistant", reply))
        return Document(tuple(segments))

    def _turns(self, rng: Random, count: int) -> list[Exchange]:
        if count > 1 and rng.random() < 0.15:
            greeting, asked_later = introduction(rng)
            return [greeting, *(self._turn(rng) for _ in range(count - 2)), asked_later]
        if count > 1 and rng.random() < 0.2:
            return self._follow_ups(rng, count)
        return [self._turn(rng) for _ in range(count)]

    def _turn(self, rng: Random) -> Exchange:
        kind = rng.random()
        if kind < 0.06:
            return story_request(rng)
        if kind < 0.14:
            return writing_request(rng)
        if kind < 0.17:
            return unknown_request(rng)
        return self._exchange(rng)

    def _follow_ups(self, rng: Random, count: int) -> list[Exchange]:
        """Draws a question, and then only the changed part of it for each further turn: "And of Italy?"."""
        topic = rng.choice(("countries", "colours", "words"))
        chosen = rng.sample([fact for fact in self._facts[topic] if fact.follow_ups], count)
        asks, reply = chosen[0].exchanges[0]
        turns = [(rephrased(rng, rng.choice(asks)), reply)]
        turns += [(rephrased(rng, rng.choice(fact.follow_ups)), fact.exchanges[0][1]) for fact in chosen[1:]]
        return turns

    def _system_prompt(self, rng: Random) -> str:
        prompt = rng.choice(SYSTEM_PROMPTS)
        if rng.random() < 0.3:
            notes = " ".join(rng.choice(self._fact(rng).statements) for _ in range(rng.randint(2, 8)))
            prompt = f"{prompt} {notes}"
        return prompt


def _plain(text: str) -> Document:
    return Document((Segment("text", text),))


def _long_text(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return stories.story(rng)
    if kind < 0.9:
        return stories.essay(rng, rng.choice(tuple(stories.ESSAYS)))
    return stories.weighted(rng, tuple(stories.POEMS.values()))


def _with_lower_case_start(sentence: str) -> str:
    """Makes the beginning look carelessly typed, but keeps the last word, which is mostly the answer."""
    start, space, last_word = sentence.rpartition(" ")
    return start.lower() + space + last_word
