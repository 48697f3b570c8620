"""A decode node between its router and its engine: commands in any order, and nothing held afterwards."""

import asyncio

import pytest

from decode_node.service import DecodeService
from kv_connector.in_process import InProcessConnector, InProcessHub
from kvrelay.core.errors import InvalidRequestError, NotTakenError
from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.core.kv.block_hash import block_hashes
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.rpc.wire import source_to_wire
from kvrelay.engine.request import EngineRequest
from kvrelay.engine.step_result import Reservation
from kvrelay.v1 import common_pb2
from kvrelay.v1 import decode_node_pb2 as pb
from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner, expected_output
from tests.node.fake_node import (
    BLOCK_SIZE,
    NAMESPACE,
    NUM_BLOCKS,
    BrokenConnector,
    FailingRunner,
    GatedRunner,
    StepwiseRunner,
    make_node,
    serving,
)
from tests.node.holders import Holder, LadderConnector
from tests.node.router_end import PATIENCE, PROMPT, Router, admit, failure, start


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
        assert not service._active and not service._streams[0].request_ids
        await router.close()
        await node.check_idle()
    assert finished == set(ids)


async def test_a_node_drains_until_its_requests_are_over_and_takes_no_new_one() -> None:
    runner = GatedRunner()
    async with serving(DecodeService, node := make_node(runner)) as service:
        router = Router(service)
        router.send(admit("a", local_prefill=True))
        await router.all_taken()
        draining = asyncio.create_task(node.drain())
        await asyncio.sleep(0)
        router.send(admit("late", local_prefill=True))
        refused = await router.event()
        assert isinstance(failure(refused), NotTakenError) and refused.request_id == "late"
        assert not draining.done()
        runner.gate.set()
        while not (await router.event()).tokens.finish_reason:
            pass
        async with asyncio.timeout(PATIENCE):
            await draining
        await router.close()
        await node.check_idle()


@pytest.mark.parametrize("ends", ["router", "commands", "service"])
async def test_a_stream_that_ends_takes_its_requests_with_it_and_leaves_nothing(ends: str) -> None:
    """The router is gone, it sends no more commands, or the node ends."""
    async with serving(DecodeService, node := make_node()) as service:
        router = Router(service)
        router.send(admit("a"), admit("b"))
        assert {(await router.event()).request_id for _ in range(2)} == {"a", "b"}
        match ends:
            case "router":
                await router.close()
            case "commands":
                router.end_commands()
            case "service":
                await service.close()
                assert not service._active, "nor does it wait for its router to read what it was sent"
        async with asyncio.timeout(PATIENCE):
            await router.ended()
            while node.activity or service._streams:
                await asyncio.sleep(0)
        await asyncio.sleep(0)  # the cancelled tasks end
        await asyncio.sleep(0)  # and tell
        assert not service._active
        assert not [task for task in asyncio.all_tasks() if "DecodeService" in repr(task.get_coro())]
        await node.check_idle()


async def test_what_a_router_says_twice_counts_once() -> None:
    first, *rest = expected_output(PROMPT, 3)
    async with serving(DecodeService, node := make_node()) as service:
        router = Router(service)
        final = pb.DecodeCommand(pull=pb.Pull(request_id="a", final=True))
        begin = start("a", [TokenOutput(0, (first,))])
        router.send(admit("a"), admit("a"), begin, begin, final, final)
        tokens: list[int] = []
        while len(tokens) < 2:
            event = await router.event()
            assert not event.HasField("failed"), event
            tokens += event.tokens.token_ids
        assert tokens == rest
        await router.close()
        await node.check_idle()


async def test_a_request_is_over_when_the_outputs_are_that_had_not_ended_with_their_first_token() -> None:
    expected = {index: expected_output(PROMPT, 3, choice_index=index) for index in (1, 2)}
    async with serving(DecodeService, node := make_node()) as service:
        router = Router(service)
        ended = TokenOutput(0, (5,), finish_reason=FinishReason.STOP)
        going_on = [TokenOutput(index, (tokens[0],)) for index, tokens in expected.items()]
        final = pb.DecodeCommand(pull=pb.Pull(request_id="a", final=True))
        router.send(admit("a", n=3), start("a", [ended, *going_on]), final)
        tokens: dict[int, list[int]] = {1: [], 2: []}
        while tokens != {index: outputs[1:] for index, outputs in expected.items()}:
            event = await router.event()
            if event.HasField("tokens"):
                tokens[event.tokens.index] += event.tokens.token_ids
        assert not service._active and not node.activity
        await router.close()
        await node.check_idle()


async def test_the_router_is_told_how_much_was_here_how_much_was_fetched_and_how_much_is_computed() -> None:
    hub, runner = InProcessHub(), FakeRunner(NUM_BLOCKS, BLOCK_SIZE)
    runner.pool = [[0] * BLOCK_SIZE for _ in runner.pool]  # it does not see what is fetched
    holder = Holder(hub, "p")
    second = list(block_hashes(NAMESPACE.root(), PROMPT, BLOCK_SIZE))[1]
    await holder.hold(Reservation("a", BLOCK_SIZE, (NamedBlock(0, second, BLOCK_SIZE),)), 1)
    async with serving(DecodeService, node := make_node(runner, InProcessConnector(hub))) as service:
        router = Router(service)
        before = admit("before", local_prefill=True)
        del before.admit.prompt_token_ids[BLOCK_SIZE + 1 :]
        router.send(before)
        while not (await router.event()).tokens.finish_reason:
            pass
        pull = pb.Pull(request_id="a", source=source_to_wire(holder.source), num_blocks=2, final=True)
        router.send(admit("a"), pb.DecodeCommand(pull=pull), start("a", [TokenOutput(0, (1,))]))
        admitted, ready = await router.event(), await router.event()
        assert (admitted.request_id, admitted.HasField("admitted")) == ("a", True)
        assert (ready.request_id, ready.kv_ready.fetches.num_tokens) == ("a", BLOCK_SIZE)
        assert ready.kv_ready.num_recomputed_tokens == len(PROMPT) - 2 * BLOCK_SIZE
        await router.close()
        await node.check_idle()
    await holder.close()


async def test_an_output_that_its_router_ends_is_over_and_the_others_go_on() -> None:
    def finish(request_id: str, index: int) -> pb.DecodeCommand:
        return pb.DecodeCommand(finish=pb.Finish(request_id=request_id, index=index))

    runner = StepwiseRunner()
    async with serving(DecodeService, node := make_node(runner)) as service:
        router = Router(service)
        router.send(admit("a", n=2, local_prefill=True))
        tokens: dict[int, list[int]] = {0: [], 1: []}
        reasons: dict[int, int] = {}
        runner.steps.release(2)  # the prompt of 20 tokens takes two steps
        while not all(tokens.values()):
            event = await router.event()
            tokens[event.tokens.index] += event.tokens.token_ids
        other = Router(service)
        other.send(finish("a", 1))
        router.send(finish("a", 0), finish("nobody", 0))
        await other.all_taken()
        await router.all_taken()
        runner.steps.release(8)
        while len(reasons) < 2:
            output = (await router.event()).tokens
            tokens[output.index] += output.token_ids
            if output.finish_reason:
                reasons[output.index] = output.finish_reason
        assert reasons == {0: common_pb2.FINISH_REASON_ABORT, 1: common_pb2.FINISH_REASON_LENGTH}
        assert tokens[1] == expected_output(PROMPT, 3, choice_index=1)
        assert not service._active and not node.activity
        await other.close()
        await router.close()
        await node.check_idle()


async def test_a_step_that_fails_ends_its_requests() -> None:
    async with serving(DecodeService, node := make_node(FailingRunner())) as service:
        router = Router(service)
        router.send(admit("a", local_prefill=True))
        event = await router.event()
        assert "not finite" in str(failure(event))
        assert not service._active and not node.activity
        await router.close()
        await node.check_idle()


async def test_a_prompt_is_computed_here_when_its_holder_has_hung_for_its_share_of_the_time_left() -> None:
    """Its log-probabilities are reported although none but those of its own tokens were asked for."""
    connector = LadderConnector(InProcessHub())
    connector.hung = {"h"}
    async with serving(DecodeService, node := make_node(connector=connector)) as service:
        router = Router(service)
        fetched, computed = admit("fetched", local_prefill=True), admit("computed", local_prefill=True)
        fetched.admit.timeout_ms = 100
        source = common_pb2.KVSource(node_id="h", epoch=1, endpoint="h")
        fetched.admit.sources.add(source=source, num_blocks=2)
        computed.admit.sampling_params.prompt_logprobs = 0
        for command in (fetched, computed):
            router.send(command)
            events: list[pb.DecodeEvent] = []
            while not events or not events[-1].tokens.finish_reason:
                events.append(await router.event())
            assert [token for event in events for token in event.tokens.token_ids] == expected_output(PROMPT, 3)
            assert any(event.HasField("prompt_logprobs") for event in events) == (command is computed)
            assert sum(event.HasField("prompt_computed") for event in events) == 1
            assert not any(event.HasField("admitted") for event in events)
        assert len(connector.fetches) == 2 and connector.timeouts[0] <= 0.05, "the store is asked, too"
        await router.close()
        await node.check_idle()


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
                    num_given = len(PROMPT) + 1
                    assert event.kv_ready.num_recomputed_tokens == num_given % BLOCK_SIZE, "all but full blocks"
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
        [TokenOutput(0, (1,)), TokenOutput(2, (1,))],
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
        assert str(failure(event)) == "the prompt is empty"
        await router.close()
        await node.check_idle()


@pytest.mark.parametrize(("field", "most"), [("max_tokens", NUM_BLOCKS * BLOCK_SIZE - len(PROMPT)), ("n", 16)])
async def test_a_request_for_which_there_will_be_no_room_fails(field: str, most: int) -> None:
    async with serving(DecodeService, node := make_node()) as service:
        router = Router(service)
        too_much = admit("too much")
        setattr(too_much.admit.sampling_params, field, most + 1)
        router.send(too_much)
        refused = failure(await router.event())
        assert isinstance(refused, InvalidRequestError) and refused.field == field
        largest = admit("most")
        setattr(largest.admit.sampling_params, field, most)
        router.send(largest)
        assert (await router.event()).HasField("admitted")
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
        assert "another router" in str(failure(refused))
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
        missing = await router.event()
        assert (missing.request_id, missing.kv_missing.num_missing_tokens) == ("a", len(PROMPT))
        router.send(pb.DecodeCommand(pull=pb.Pull(request_id="a", final=True)))
        ready = (await router.event()).kv_ready
        assert (ready.fetches.num_tokens, ready.num_recomputed_tokens) == (0, len(PROMPT))
        assert ready.fetches.num_failed == 5 and not ready.fetches.fetched
        tokens: list[int] = []
        while len(tokens) < 2:
            tokens += (await router.event()).tokens.token_ids
        assert tokens == expected_output(PROMPT, 3)[1:]
        await router.close()
        await node.check_idle()


async def test_an_unforeseen_error_in_the_engine_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    def fail(request: EngineRequest) -> None:
        raise ZeroDivisionError("no such case")

    async with serving(DecodeService, node := make_node()) as service:
        await node.engine_thread.call(lambda engine: setattr(engine, "add", fail))
        router = Router(service)
        router.send(admit("a"))
        assert str(failure(await router.event())) == "internal error"
        assert "no such case" in caplog.text
        await node.check_idle()
        await router.close()


async def test_an_unforeseen_error_in_a_fetch_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    """It ends at once, with the cause in the log, and not at its deadline."""
    connector = BrokenConnector(InProcessHub())
    async with serving(DecodeService, node := make_node(connector=connector)) as service:
        router = Router(service)
        source = common_pb2.KVSource(node_id="p", epoch=1, endpoint="nowhere")
        pull = pb.Pull(request_id="a", source=source, num_blocks=3)
        router.send(admit("a"), pb.DecodeCommand(pull=pull))
        assert (await router.event()).HasField("admitted")
        assert str(failure(await router.event())) == "internal error"
        assert "no such case" in caplog.text
        await node.check_idle()
        await router.close()
