"""A router's end of its stream to a node, and the commands that it sends to a decode node."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar, cast

from decode_node.service import DecodeService
from kvrelay.core.errors import KVRelayError
from kvrelay.core.generation.outputs import TokenOutput
from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.core.rpc.calls import Context
from kvrelay.core.rpc.errors import error_from_status
from kvrelay.core.rpc.wire import output_to_wire, sampling_to_wire
from kvrelay.v1 import decode_node_pb2 as pb
from tests.node.fake_node import EPOCH

PROMPT = list(range(100, 120))
PATIENCE = 10.0

_NO_CONTEXT = cast(Context, None)  # the service reads nothing from it


def admit(request_id: str, *, n: int = 1, local_prefill: bool = False, max_tokens: int = 3) -> pb.DecodeCommand:
    sampling = sampling_to_wire(SamplingParams(n=n, max_tokens=max_tokens, temperature=0.0, seed=0))
    message = pb.Admit(request_id=request_id, epoch=EPOCH, prompt_token_ids=PROMPT, sampling_params=sampling)
    message.local_prefill = local_prefill
    return pb.DecodeCommand(admit=message)


def start(request_id: str, outputs: Sequence[TokenOutput]) -> pb.DecodeCommand:
    return pb.DecodeCommand(start=pb.Start(request_id=request_id, first_tokens=map(output_to_wire, outputs)))


def together(*commands: pb.DecodeCommand) -> pb.DecodeCommands:
    return pb.DecodeCommands(commands=commands)


def failure(event: pb.DecodeEvent) -> KVRelayError:
    """Returns the error with which the request of this event has failed."""
    assert event.HasField("failed"), event
    return error_from_status(event.failed.status)


_CommandT = TypeVar("_CommandT")
_CommandsT = TypeVar("_CommandsT")
_CommandsT_contra = TypeVar("_CommandsT_contra", contravariant=True)
_EventT = TypeVar("_EventT")
_EventT_co = TypeVar("_EventT_co", covariant=True)


class _Update(Protocol[_EventT_co]):
    @property
    def events(self) -> Iterable[_EventT_co]: ...


class _Service(Protocol[_CommandsT_contra, _EventT_co]):
    """A decode service or a prefill service."""

    def Serve(
        self, request_iterator: AsyncIterator[_CommandsT_contra], context: Context
    ) -> AsyncIterator[_Update[_EventT_co]]: ...


class RouterEnd(Generic[_CommandT, _CommandsT, _EventT]):
    """The router's end of the stream. Commands travel one by one."""

    def __init__(
        self, service: _Service[_CommandsT, _EventT], message_of: Callable[[list[_CommandT]], _CommandsT]
    ) -> None:
        self._message_of = message_of
        self._commands: asyncio.Queue[_CommandT | asyncio.Event | None] = asyncio.Queue()
        self._events: asyncio.Queue[_EventT] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(service))

    def send(self, *commands: _CommandT) -> None:
        for command in commands:
            self._commands.put_nowait(command)

    async def all_taken(self) -> None:
        """Returns when the node has handled everything sent so far."""
        taken = asyncio.Event()
        self._commands.put_nowait(taken)
        async with asyncio.timeout(PATIENCE):
            await taken.wait()

    async def event(self) -> _EventT:
        async with asyncio.timeout(PATIENCE):
            return await self._events.get()

    def end_commands(self) -> None:
        """Has the node hear that no more commands come."""
        self._commands.put_nowait(None)

    async def ended(self) -> None:
        """Returns when the node has ended the stream, or `close` has."""
        await asyncio.wait([self._task])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, service: _Service[_CommandsT, _EventT]) -> None:
        async with aclosing(cast(Any, service.Serve(self._outgoing(), _NO_CONTEXT))) as updates:
            async for update in updates:
                for event in update.events:
                    self._events.put_nowait(event)

    async def _outgoing(self) -> AsyncIterator[_CommandsT]:
        while True:
            command = await self._commands.get()
            if command is None:
                return
            if isinstance(command, asyncio.Event):
                command.set()
            else:
                yield self._message_of([command])


class Router(RouterEnd[pb.DecodeCommand, pb.DecodeCommands, pb.DecodeEvent]):
    """The router's end of a stream to a decode node."""

    def __init__(self, service: DecodeService) -> None:
        super().__init__(service, lambda commands: pb.DecodeCommands(commands=commands))
