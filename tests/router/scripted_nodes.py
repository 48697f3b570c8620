"""Nodes without an engine: real gRPC servers, each answer of which the test decides, and in which order."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc

from kvrelay.core.errors import KVRelayError
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.kv.block_hash import BlockHash, KVNamespace
from kvrelay.core.node_report import PROTOCOL
from kvrelay.core.rpc.calls import CallInterceptor
from kvrelay.core.rpc.connections import serve_insecure, server_options
from kvrelay.core.rpc.errors import rich_status
from kvrelay.core.rpc.wire import namespace_to_wire, output_to_wire
from kvrelay.v1 import (
    common_pb2,
    decode_node_pb2,
    decode_node_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    prefill_node_pb2,
    prefill_node_pb2_grpc,
)

BLOCK_SIZE = 4
NAMESPACE = KVNamespace(b"\x01" * 32, "float32", "test-layout", BLOCK_SIZE)
PATIENCE = 20.0
HEARTBEAT = 0.2

_Item = TypeVar("_Item")


class ScriptedNode(node_pb2_grpc.NodeServicer):
    """What both kinds of node share. Watch streams what is in `updates`; the first update is there from the start."""

    def __init__(self, node_id: str, role: "node_pb2.NodeRole.ValueType") -> None:
        self.node_id = node_id
        self.role = role
        self.epoch = 1
        self.namespace = NAMESPACE
        self.connector = "in_process"
        self.endpoint = f"endpoint-{node_id}"
        self.max_model_len = 4096
        self.max_num_seqs = 8
        self.vocab_size = 1000
        self.protocol = PROTOCOL
        self.vocabulary = b""
        self.core_table = ""
        self.eos_token_ids = [2]
        self.updates: asyncio.Queue[node_pb2.WatchResponse | None] = asyncio.Queue()  # None ends the stream
        self.watch_requests: asyncio.Queue[node_pb2.WatchRequest] = asyncio.Queue()
        self.distrust_requests: asyncio.Queue[node_pb2.DistrustRequest] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self.port = 0
        self.is_silent = False  # as a stopped process
        self.update(0, reset=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def update(
        self,
        sequence: int,
        *,
        reset: bool = False,
        stored: Sequence[BlockHash] = (),
        removed: Sequence[BlockHash] = (),
        num_queued_tokens: int = 0,
        epoch: int | None = None,
        draining: bool = False,
    ) -> None:
        load = node_pb2.NodeLoad(num_queued_tokens=num_queued_tokens, num_free_blocks=1000, num_blocks=1000)
        self.updates.put_nowait(
            node_pb2.WatchResponse(
                epoch=self.epoch if epoch is None else epoch,
                sequence=sequence,
                reset=reset,
                stored=stored,
                removed=removed,
                load=load,
                draining=draining,
            )
        )

    def end_watch(self) -> None:
        self.updates.put_nowait(None)

    def attach(self, server: grpc.aio.Server) -> None:
        node_pb2_grpc.add_NodeServicer_to_server(self, server)

    async def start(self) -> None:
        """Starts serving, on the port the node had before if it had one."""
        self._server = grpc.aio.server(interceptors=[CallInterceptor()], options=server_options())
        self.attach(self._server)
        self.port = await serve_insecure(self._server, "127.0.0.1", self.port)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    async def start_again(self, *, epoch: int) -> None:
        """Starts the node again, without blocks; as another process unless the epoch is the same."""
        self.epoch = epoch
        self.update(0, reset=True)
        await self.start()

    async def Describe(self, request: node_pb2.DescribeRequest, context: object) -> node_pb2.DescribeResponse:
        return node_pb2.DescribeResponse(
            role=self.role,
            source=common_pb2.KVSource(node_id=self.node_id, epoch=self.epoch, endpoint=self.endpoint),
            kv_namespace=namespace_to_wire(self.namespace),
            connector=self.connector,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            max_num_seqs=self.max_num_seqs,
            protocol=self.protocol,
            vocabulary=self.vocabulary,
            core_table=self.core_table,
            eos_token_ids=self.eos_token_ids,
        )

    async def Distrust(self, request: node_pb2.DistrustRequest, context: object) -> node_pb2.DistrustResponse:
        self.distrust_requests.put_nowait(request)
        return node_pb2.DistrustResponse()

    async def Watch(self, request: node_pb2.WatchRequest, context: object) -> AsyncIterator[node_pb2.WatchResponse]:
        self.watch_requests.put_nowait(request)
        last = node_pb2.WatchResponse()
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT):
                    update = await self.updates.get()
            except TimeoutError:
                if self.is_silent or not last.HasField("load"):
                    continue
                yield node_pb2.WatchResponse(
                    epoch=last.epoch, sequence=last.sequence, load=last.load, draining=last.draining
                )
            else:
                if update is None:
                    return
                last = update
                yield last


@dataclass(slots=True)
class PrefillCall:
    """A request on a prefill node, until it is `over`: released, or its stream has ended."""

    request: prefill_node_pb2.PrefillRequest
    updates: asyncio.Queue[prefill_node_pb2.PrefillUpdate | None]  # of its stream
    name: str  # what the test calls it: its id, or what it is accepted as
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def accept(self, name: str = "lease") -> None:
        self.name = name
        self.send(accepted=prefill_node_pb2.PrefillAccepted())

    def publish(self, num_blocks: int) -> None:
        self.send(progress=prefill_node_pb2.PrefillProgress(num_published_blocks=num_blocks))

    def finish(self, *first_tokens: TokenOutput, num_cached_tokens: int = 0, num_fetched_tokens: int = 0) -> None:
        finished = prefill_node_pb2.PrefillFinished(
            first_tokens=[output_to_wire(output) for output in first_tokens],
            num_cached_tokens=num_cached_tokens,
            fetches=common_pb2.FetchReport(num_tokens=num_fetched_tokens),
        )
        self.send(finished=finished)

    def end(self, error: KVRelayError | None = None) -> None:
        if error is None:
            self.send(ended=prefill_node_pb2.PrefillEnded())
        else:
            self.send(failed=prefill_node_pb2.PrefillFailed(status=rich_status(error).SerializeToString()))

    def send(self, **event: Any) -> None:
        sent = prefill_node_pb2.PrefillEvent(request_id=self.request.request_id, **event)
        self.updates.put_nowait(prefill_node_pb2.PrefillUpdate(events=[sent]))


class ScriptedPrefill(ScriptedNode, prefill_node_pb2_grpc.PrefillNodeServicer):
    """The names in `renewed`, `released` and `forgotten` are those of the calls."""

    def __init__(self, node_id: str = "prefill-0") -> None:
        super().__init__(node_id, node_pb2.NODE_ROLE_PREFILL)
        self.calls: asyncio.Queue[PrefillCall] = asyncio.Queue()
        self.renewed: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self.released: asyncio.Queue[str] = asyncio.Queue()
        self.renewal_failures: list[KVRelayError] = []
        self.forgotten: set[str] = set()  # leases of which the node says that it does not know them
        self.num_unanswered = 0  # of the next renewals
        self._calls: dict[str, PrefillCall] = {}  # all there ever were, by request id
        self._streams: list[asyncio.Queue[prefill_node_pb2.PrefillUpdate | None]] = []

    def attach(self, server: grpc.aio.Server) -> None:
        super().attach(server)
        prefill_node_pb2_grpc.add_PrefillNodeServicer_to_server(self, server)

    async def Serve(
        self, request_iterator: AsyncIterator[prefill_node_pb2.PrefillCommands], context: object
    ) -> AsyncIterator[prefill_node_pb2.PrefillUpdate]:
        updates: asyncio.Queue[prefill_node_pb2.PrefillUpdate | None] = asyncio.Queue()
        self._streams.append(updates)
        reader = asyncio.create_task(self._read(request_iterator, updates))
        try:
            while (update := await updates.get()) is not None:
                yield update
        finally:
            reader.cancel()
            for call in self._calls.values():
                if call.updates is updates:
                    call.over.set()

    async def _read(
        self,
        messages: AsyncIterator[prefill_node_pb2.PrefillCommands],
        updates: asyncio.Queue[prefill_node_pb2.PrefillUpdate | None],
    ) -> None:
        async for message in messages:
            for command in message.commands:
                if command.HasField("prefill"):
                    assert command.prefill.epoch == self.epoch
                    call = PrefillCall(command.prefill, updates, command.prefill.request_id)
                    self._calls[command.prefill.request_id] = call
                    self.calls.put_nowait(call)
                else:
                    request_id = command.release.request_id
                    self.released.put_nowait(self._name(request_id))
                    if request_id in self._calls:
                        self._calls[request_id].over.set()
        updates.put_nowait(None)

    def end_streams(self) -> None:
        for updates in self._streams:
            updates.put_nowait(None)

    async def RenewLeases(
        self, request: prefill_node_pb2.RenewLeasesRequest, context: object
    ) -> prefill_node_pb2.RenewLeasesResponse:
        if self.num_unanswered:
            self.num_unanswered -= 1
            await asyncio.Event().wait()  # the caller's deadline ends it
        if self.renewal_failures:
            raise self.renewal_failures.pop()
        names = {lease_id: self._name(lease_id) for lease_id in request.lease_ids}
        self.renewed.put_nowait(tuple(names.values()))
        return prefill_node_pb2.RenewLeasesResponse(
            unknown_lease_ids=[lease_id for lease_id, name in names.items() if name in self.forgotten]
        )

    def _name(self, request_id: str) -> str:
        call = self._calls.get(request_id)
        return request_id if call is None else call.name


class ScriptedDecode(ScriptedNode, decode_node_pb2_grpc.DecodeNodeServicer):
    def __init__(self, node_id: str = "decode-0") -> None:
        super().__init__(node_id, node_pb2.NODE_ROLE_DECODE)
        self.commands: asyncio.Queue[decode_node_pb2.DecodeCommand] = asyncio.Queue()
        self.num_streams = 0
        self._updates: asyncio.Queue[decode_node_pb2.DecodeUpdate | None] = asyncio.Queue()

    def attach(self, server: grpc.aio.Server) -> None:
        super().attach(server)
        decode_node_pb2_grpc.add_DecodeNodeServicer_to_server(self, server)

    async def Serve(
        self, request_iterator: AsyncIterator[decode_node_pb2.DecodeCommands], context: object
    ) -> AsyncIterator[decode_node_pb2.DecodeUpdate]:
        self.num_streams += 1
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while (update := await self._updates.get()) is not None:
                yield update
        finally:
            reader.cancel()

    async def _read(self, messages: AsyncIterator[decode_node_pb2.DecodeCommands]) -> None:
        async for message in messages:
            for command in message.commands:
                self.commands.put_nowait(command)

    async def admit(self) -> decode_node_pb2.Admit:
        admit = (await self._next("admit")).admit
        assert admit.epoch == self.epoch
        return admit

    async def pull(self) -> decode_node_pb2.Pull:
        return (await self._next("pull")).pull

    async def started(self) -> decode_node_pb2.Start:
        return (await self._next("start")).start

    async def told_to_finish(self) -> tuple[str, int]:
        finish = (await self._next("finish")).finish
        return finish.request_id, finish.index

    async def aborted(self) -> str:
        return (await self._next("abort")).abort.request_id

    async def _next(self, kind: str) -> decode_node_pb2.DecodeCommand:
        """Returns the next command, which must be of this kind."""
        command = await soon(self.commands)
        assert command.WhichOneof("command") == kind, command
        return command

    def admitted(self, request_id: str) -> None:
        self.send(decode_node_pb2.DecodeEvent(request_id=request_id, admitted=decode_node_pb2.Admitted()))

    def prompt_computed(self, request_id: str, num_cached_tokens: int) -> None:
        event = decode_node_pb2.PromptComputed(num_cached_tokens=num_cached_tokens)
        self.send(decode_node_pb2.DecodeEvent(request_id=request_id, prompt_computed=event))

    def kv_missing(self, request_id: str, num_tokens: int) -> None:
        event = decode_node_pb2.KVMissing(num_missing_tokens=num_tokens)
        self.send(decode_node_pb2.DecodeEvent(request_id=request_id, kv_missing=event))

    def kv_ready(
        self,
        request_id: str,
        *,
        fetched: int,
        recomputed: int = 0,
        fetches: common_pb2.FetchReport | None = None,
    ) -> None:
        event = decode_node_pb2.KVReady(num_recomputed_tokens=recomputed, fetches=fetches)
        event.fetches.num_tokens = fetched
        self.send(decode_node_pb2.DecodeEvent(request_id=request_id, kv_ready=event))

    def tokens(self, request_id: str, output: TokenOutput) -> None:
        self.send(decode_node_pb2.DecodeEvent(request_id=request_id, tokens=output_to_wire(output)))

    def failed(self, request_id: str, error: KVRelayError) -> None:
        failure = decode_node_pb2.DecodeFailed(status=rich_status(error).SerializeToString())
        self.send(decode_node_pb2.DecodeEvent(request_id=request_id, failed=failure))

    def send(self, *events: decode_node_pb2.DecodeEvent) -> None:
        self._updates.put_nowait(decode_node_pb2.DecodeUpdate(events=events))

    def end_stream(self) -> None:
        self._updates.put_nowait(None)


@asynccontextmanager
async def node_that_is_not_live() -> AsyncIterator[ScriptedDecode]:
    """Yields a node that describes itself and says no more, so that a router which starts waits for it."""
    silent = ScriptedDecode()
    silent.updates.get_nowait()
    await silent.start()
    try:
        yield silent
    finally:
        await silent.stop()


async def soon(queue: asyncio.Queue[_Item]) -> _Item:
    async with asyncio.timeout(PATIENCE):
        return await queue.get()


async def until(condition: Callable[[], bool]) -> None:
    """Lets the tasks of the registry, which share this loop, run until the condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


def token(token_id: int, *, index: int = 0, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(index, (token_id,), finish_reason=finish)
