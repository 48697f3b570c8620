"""Requests that are ready to be sent: prompt drawn, text decoded, message encoded.

Invariant: only `next_request` builds anything, and it yields to the loop after every slice of a prompt.
"""

from dataclasses import dataclass

from kvrelay.bench.base import Client, RequestSpec, Send
from kvrelay.bench.prompts import Conversation, PromptBuilder
from kvrelay.bench.workloads import Session


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """One request: what it asks, the conversation that hears its answer, and the function that sends it."""

    spec: RequestSpec
    conversation: Conversation
    send: Send


class SessionRequests:
    """The requests of session number `number`, one after the other."""

    def __init__(self, client: Client, builder: PromptBuilder, number: int, session: Session) -> None:
        self._client = client
        self._builder = builder
        self._name = str(number)
        self._specs = iter(session.requests)
        self._is_conversation = session.is_conversation
        self._conversation = builder.conversation(self._name)

    async def next_request(self) -> ReadyRequest | None:
        """Builds the next request, or returns None after the last one. A conversation must have heard the answers to
        all earlier ones."""
        spec = next(self._specs, None)
        if spec is None:
            return None
        if not self._is_conversation:
            self._conversation = self._builder.conversation(self._name)
        prompt = await self._conversation.ask(spec.segments)
        return ReadyRequest(spec, self._conversation, await self._client.prepare(prompt, spec.max_tokens))
