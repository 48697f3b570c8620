"""Requests that are ready to be sent: prompt drawn, text decoded, message encoded.

Invariant: only `next_request` builds anything, and it yields to the loop after every slice of a prompt. Outside of
conversations nothing but the encoded message is kept.
"""

from dataclasses import dataclass

from kvrelay.bench.base import Answer, Client, RequestSpec, Send
from kvrelay.bench.prompts import PromptBuilder
from kvrelay.bench.workloads import Session


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """One request: what it asks, the tokens of its prompt with all earlier turns (0 of a given text), and the function
    that sends it. `is_later_turn` tells that there are such turns."""

    spec: RequestSpec
    num_prompt_tokens: int
    send: Send
    is_later_turn: bool


class SessionRequests:
    """The requests of session number `number`, one after the other."""

    def __init__(self, client: Client, builder: PromptBuilder, number: int, session: Session) -> None:
        self._client = client
        self._builder = builder
        self._name = str(number)
        self._specs = iter(session.requests)
        self._conversation = builder.conversation(self._name) if session.is_conversation else None
        self._num_said = 0  # tokens of the conversation so far

    async def next_request(self) -> ReadyRequest | None:
        """Builds the next request, or returns None after the last one. A conversation must have heard the answers to
        all earlier ones."""
        spec = next(self._specs, None)
        if spec is None:
            return None
        conversation = self._conversation or self._builder.conversation(self._name)
        prompt = self._builder.given(spec.text) if spec.text else await conversation.ask(spec.segments)
        is_later_turn = self._num_said > 0
        num_prompt_tokens = self._num_said + sum(segment.length for segment in spec.segments)
        if self._conversation is not None:
            self._num_said = num_prompt_tokens
        send = await self._client.prepare(prompt, spec.max_tokens)
        return ReadyRequest(spec, num_prompt_tokens, send, is_later_turn)

    def hear(self, answer: Answer) -> None:
        """Makes the answer part of a conversation's next prompt."""
        if self._conversation is not None:
            self._conversation.hear(answer)
            self._num_said += answer.num_tokens
