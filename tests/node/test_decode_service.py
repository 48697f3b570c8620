"""A decode node between its router and its engine: commands in any order, and nothing held afterwards."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, cast

import grpc
import pytest

from decode_node.service import DecodeService
from kv_connector.in_process import InProcessHub
from kvrelay.core.outputs import FinishReason, TokenOutput
from kvrelay.core.rpc import Context
from kvrelay.core.sampling_params import SamplingParams
from kvrelay.core.wire import output_to_wire, sampling_to_wire
from kvrelay.engine.request import StepResult
from kvrelay.v1 import common_pb2
from kvrelay.v1 import decode_node_pb2 as pb
from tests.engine.fake_runner import VOCAB_SIZE, expected_output
from tests.node.fake_node import BLOCK_SIZE, NUM_BLOCKS, BrokenConnector, GatedRunner, make_node, serving

PROMPT = list(range(100, 120))
NO_CONTEXT = cast(Context, None)  # the service reads nothing from it
PATIENCE = 10.0


def admit(request_id: str, *, n: int = 1, local_prefill: bool = False) -> pb.DecodeCommand:
    sampling = sampling_to_wire(SamplingParams(n=n, max_tokens=3, temperature=0.0, seed=0))
    message = pb.Admit(request_id=request_id, prompt_token_ids=PROMPT, sampling_params=sampling)
    message.local_prefill = local_prefill
    return pb.DecodeCommand(admit=message)


def start(request_id: str, outputs: Sequence[TokenOutput]) -> pb.DecodeCommand:
    return pb.DecodeCommand(start=pb.Start(request_id=request_id, first_tokens=map(output_to_wire, outputs)))


class Router:
    """The router's end of the stream."""

    def __init__(self, service: DecodeService) -> None:
        self._commands: asyncio.Queue[pb.DecodeCommand | asyncio.Event] = asyncio.Queue()
        self._events: asyncio.Queue[pb.DecodeEvent] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(service))

    def send(self, *commands: pb.DecodeCommand) -> None:
        for command in commands:
            self._commands.put_nowait(command)

    async def all_taken(self) -> None:
        """Returns when the node has handled everything sent so far."""
        taken = asyncio.Event()
        self._commands.put_nowait(taken)
        async with asyncio.timeout(PATIENCE):
            await taken.wait()

    async def event(self) -> pb.DecodeEvent:
        async with asyncio.timeout(PATIENCE):
            return await self._events.get()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, service: DecodeService) -> None:
        async with aclosing(cast(Any, service.Serve(self._outgoing(), NO_CONTEXT))) as updates:
            async for update in updates:
                for event in update.events:
                    self._events.put_nowait(event)

    async def _outgoing(self) -> AsyncIterator[pb.DecodeCommand]:
        while True:
            command = await self._commands.get()
            if isinstance(command, asyncio.Event):
                command.set()
            else:
                yield command


async def test_commands_do_not_wait_for_the_step_under_way() -> None:
    runner = GatedRunner()
    async with serving(DecodeService, node := make_node(runner)) as service:
        router = Router(service)
        ids = [str(i) for i in range(8)]
        router.send(*(admit(request_id, local_prefill=True) for request_id in ids))
        await router.all_taken()
        runner.gate.set()
        finished = set[str]()
        while len(finished) < len(ids):
            event = await router.event()
            if event.tokens.finish_reason:
                finished.add(event.request_id)
        await router.close()
        await node.check_idle()
    assert finished == set(ids)


async def test_an_abort_before_the_reception_has_begun_unpins_its_blocks() -> None:
    """The task is cancelled before its first step, so that no code in it ever runs."""
    async with serving(DecodeService, node := make_node()) as service:
        aborted = asyncio.Event()
        handle = node._handler

        def abort_at_once(result: StepResult) -> None:
            handle(result)
            for admission in result.admissions:
                service._abort(admission.request_id)
                aborted.set()

        node._handler = abort_at_once
        router = Router(service)
        router.send(admit("a"))
        async with asyncio.timeout(PATIENCE):
            await aborted.wait()
        await asyncio.sleep(0)  # the cancelled task ends
        await asyncio.sleep(0)  # and tells
        await node.check_idle()
        await router.close()


async def test_an_output_that_began_elsewhere_continues_under_its_index() -> None:
    """It is prefilled here, or its next token was sampled elsewhere."""
    whole = expected_output(PROMPT, 3, choice_index=5)
    async with serving(DecodeService, node := make_node()) as service:
        router = Router(service)
        for request_id, local_prefill in (("local", True), ("split", False)):
            command = admit(request_id, local_prefill=local_prefill)
            command.admit.prompt_token_ids.extend(whole[:1])
            command.admit.num_prior_output_tokens = 1
            command.admit.first_choice_index = 5
            router.send(command)
            if not local_prefill:
                final = pb.Pull(request_id=request_id, final=True)
                router.send(pb.DecodeCommand(pull=final), start(request_id, [TokenOutput(5, (whole[1],))]))
            tokens: list[int] = []
            finished = False
            while not finished:
                event = await router.event()
                assert not event.HasField("failed"), event
                if event.HasField("kv_ready"):
                    assert event.kv_ready.num_cached_tokens + event.kv_ready.num_recomputed_tokens == len(PROMPT) + 1
                if event.HasField("tokens"):
                    assert event.tokens.index == 5
                    tokens += event.tokens.token_ids
                    finished = bool(event.tokens.finish_reason)
            assert tokens == (whole[1:] if local_prefill else whole[2:])
        await router.close()
        await node.check_idle()


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [TokenOutput(0, ())],
        [TokenOutput(0, (1, 2))],
        [TokenOutput(0, (VOCAB_SIZE,))],
        [TokenOutput(2, (1,))],
        [TokenOutput(0, (1,)), TokenOutput(0, (2,))],
        [TokenOutput(0, (1,), finish_reason=FinishReason.STOP)],
    ],
)
async def test_invalid_first_tokens_fail_only_their_request(outputs: list[TokenOutput]) -> None:
    async with serving(DecodeService, node := make_node()) as service:
        router = Router(service)
        router.send(admit("bad", n=2), start("bad", outputs))
        while not (event := await router.event()).HasField("failed"):
            pass
        assert event.request_id == "bad"
        router.send(admit("good", local_prefill=True))
        tokens: list[int] = []
        while len(tokens) < 3:
            tokens += (await router.event()).tokens.token_ids
        assert tokens == expected_output(PROMPT, 3)
        await router.close()
        await node.check_idle()


async def test_a_request_that_the_engine_refuses_fails() -> None:
    async with serving(DecodeService, node := make_node()) as service:
        router = Router(service)
        empty = admit("a")
        empty.admit.ClearField("prompt_token_ids")
        router.send(empty)
        event = await router.event()
        assert event.failed.message == "the prompt is empty"
        await router.close()
        await node.check_idle()


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("max_tokens", NUM_BLOCKS * BLOCK_SIZE - len(PROMPT) + 1, "node takes 512 tokens, not 513"),
        ("n", 17, "node runs 16 sequences, not 17"),
    ],
)
async def test_a_request_for_which_there_will_be_no_room_is_left_to_another_node(
    field: str, value: int, why: str
) -> None:
    async with serving(DecodeService, node := make_node()) as service:
        router = Router(service)
        too_much = admit("a")
        setattr(too_much.admit.sampling_params, field, value)
        router.send(too_much)
        event = await router.event()
        assert event.failed.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert event.failed.message == why
        await router.close()
        await node.check_idle()


async def test_a_request_obeys_its_own_router_only() -> None:
    async with serving(DecodeService, node := make_node()) as service:
        mine, other = Router(service), Router(service)
        mine.send(admit("a"))
        assert (await mine.event()).HasField("admitted")
        other.send(
            pb.DecodeCommand(abort=pb.Abort(request_id="a")),
            pb.DecodeCommand(pull=pb.Pull(request_id="a", final=True)),
            start("a", [TokenOutput(0, (999,))]),
            admit("a"),
        )
        refused = await other.event()
        assert "another router" in refused.failed.message
        await other.close()
        first, *rest = expected_output(PROMPT, 3)
        final = pb.Pull(request_id="a", final=True)
        mine.send(start("a", [TokenOutput(0, (first,))]), pb.DecodeCommand(pull=final))
        assert (await mine.event()).kv_ready.num_recomputed_tokens == len(PROMPT)
        tokens: list[int] = []
        while len(tokens) < 2:
            tokens += (await mine.event()).tokens.token_ids
        assert tokens == rest
        await mine.close()
        await node.check_idle()


async def test_missing_blocks_are_reported_to_the_router_which_names_a_source_or_ends_the_wait() -> None:
    """Neither a holder nor the prefill node can be reached; the node computes the blocks when the router says so."""
    async with serving(DecodeService, node := make_node()) as service:
        router = Router(service)
        command = admit("a")
        command.admit.sources.add(source=common_pb2.KVSource(node_id="h", epoch=1, endpoint="h"), num_blocks=2)
        router.send(command)
        gone = common_pb2.KVSource(node_id="p", epoch=1, endpoint="p")
        router.send(pb.DecodeCommand(pull=pb.Pull(request_id="a", source=gone, num_blocks=3, ended=True)))
        router.send(start("a", [TokenOutput(0, (expected_output(PROMPT, 1)[0],))]))
        assert (await router.event()).HasField("admitted")
        assert (await router.event()).kv_missing.num_missing_tokens == len(PROMPT)
        router.send(pb.DecodeCommand(pull=pb.Pull(request_id="a", final=True)))
        ready = (await router.event()).kv_ready
        assert (ready.num_fetched_tokens, ready.num_recomputed_tokens) == (0, len(PROMPT))
        assert ready.fetches.num_failed == 5 and not ready.fetches.fetched
        tokens: list[int] = []
        while len(tokens) < 2:
            tokens += (await router.event()).tokens.token_ids
        assert tokens == expected_output(PROMPT, 3)[1:]
        await router.close()
        await node.check_idle()


async def test_an_unforeseen_error_in_a_fetch_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    """It ends at once, with the cause in the log, and not at its deadline."""
    connector = BrokenConnector(InProcessHub())
    async with serving(DecodeService, node := make_node(connector=connector)) as service:
        router = Router(service)
        source = common_pb2.KVSource(node_id="p", epoch=1, endpoint="nowhere")
        pull = pb.Pull(request_id="a", source=source, num_blocks=3)
        router.send(admit("a"), pb.DecodeCommand(pull=pull))
        assert (await router.event()).HasField("admitted")
        assert (await router.event()).failed.message == "internal error"
        assert "no such case" in caplog.text
        await node.check_idle()
        await router.close()
