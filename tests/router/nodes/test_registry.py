"""The node table against real gRPC servers: which nodes are let in, what is remembered, and what a restart changes."""

import asyncio
import logging
from dataclasses import replace

import pytest

from kvrelay.core.errors import UnavailableError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.node_report import PROTOCOL, NodeRole
from kvrelay.v1 import node_pb2
from router.nodes import fit
from router.nodes.node import NodeState
from tests.router.scripted_cluster import registered, settled
from tests.router.scripted_nodes import NAMESPACE, PATIENCE, ScriptedDecode, ScriptedNode, ScriptedPrefill, soon, until

A, B, C = (BlockHash(bytes([number]) * 32) for number in range(3))


async def test_live_nodes_are_described_and_their_events_reach_the_index() -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    prefill.max_model_len, decode.max_num_seqs = 1000, 4
    async with registered(prefill, decode) as registry:
        await settled(registry)
        model = registry.served_model()
        assert (model.max_model_len, model.max_num_seqs) == (1000, 4)
        assert (model.vocab_size, model.kv_namespace) == (1000, NAMESPACE)
        prefill.update(1, stored=[A, B], num_queued_tokens=5)
        decode.update(1, stored=[A])
        await until(lambda: registry.index.leading([A, B]) == {"prefill-0": 2, "decode-0": 1})
        assert registry.prefill[0].load.num_queued_tokens == 5
        heard_at = registry.prefill[0].heard_at
        prefill.update(2, removed=[B])
        await until(lambda: registry.index.leading([A, B]) == {"prefill-0": 1, "decode-0": 1})
        prefill.update(3, reset=True, stored=[C])
        await until(lambda: registry.index.leading([C]) == {"prefill-0": 1})
        assert registry.index.leading([A]) == {"decode-0": 1}
        assert heard_at is not None and registry.prefill[0].heard_at is not None
        assert registry.prefill[0].heard_at > heard_at


async def test_without_a_decode_node_nothing_is_served() -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    async with registered(prefill, decode) as registry:
        await settled(registry)
        await decode.stop()
        await until(lambda: registry.decode[0].state is NodeState.LOST)
        with pytest.raises(UnavailableError, match="is lost"):
            registry.served_model()
        assert len(registry.live(NodeRole.PREFILL)) == 1


async def test_a_node_that_comes_back_in_the_same_epoch_is_asked_for_what_was_missed() -> None:
    decode = ScriptedDecode()
    async with registered(decode) as registry:
        decode.update(7, stored=[A])
        await until(lambda: registry.index.leading([A]) == {"decode-0": 1})
        await soon(decode.watch_requests)
        await decode.stop()
        await until(lambda: registry.decode[0].state is NodeState.LOST)
        assert registry.index.leading([A]) == {"decode-0": 1}  # kept: it may come back
        decode.update(8, stored=[B])
        await decode.start()
        request = await soon(decode.watch_requests)
        assert (request.epoch, request.after_sequence) == (1, 7)
        await until(lambda: registry.index.leading([A, B]) == {"decode-0": 2})


async def test_a_new_epoch_forgets_what_the_old_one_held() -> None:
    decode = ScriptedDecode()
    async with registered(decode) as registry:
        decode.update(7, stored=[A])
        await until(lambda: registry.index.leading([A]) == {"decode-0": 1})
        await soon(decode.watch_requests)
        await decode.stop()
        decode.epoch = 2
        decode.update(0, reset=True)
        await decode.start()
        request = await soon(decode.watch_requests)
        assert (request.epoch, request.after_sequence) == (0, 0)
        await until(lambda: registry.decode[0].state is NodeState.LIVE)
        assert registry.index.leading([A]) == {}


async def test_a_node_that_comes_back_under_another_id_takes_no_blocks_along() -> None:
    decode = ScriptedDecode("old")
    async with registered(decode) as registry:
        decode.update(7, stored=[A])
        await until(lambda: registry.index.leading([A]) == {"old": 1})
        await decode.stop()
        decode.node_id = "new"
        await decode.start_again(epoch=2)
        await until(lambda: registry.decode[0].name.startswith("new") and registry.can_serve())
        assert registry.index.leading([A]) == {}


async def test_a_snapshot_that_broke_off_is_asked_for_again_from_its_beginning() -> None:
    decode = ScriptedDecode()
    async with registered(decode) as registry:
        await settled(registry)
        await soon(decode.watch_requests)
        decode.updates.put_nowait(node_pb2.WatchResponse(epoch=1, sequence=9, reset=True, stored=[A]))
        await until(lambda: registry.index.leading([A]) == {"decode-0": 1})
        await decode.stop()
        await decode.start()
        request = await soon(decode.watch_requests)
        assert (request.epoch, request.after_sequence) == (0, 0)


class MuteDecode(ScriptedDecode):
    """A node that takes connections and answers nothing."""

    async def Describe(self, request: node_pb2.DescribeRequest, context: object) -> node_pb2.DescribeResponse:
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_node_that_does_not_describe_itself_holds_the_others_up_for_a_while_only() -> None:
    mute, decode = MuteDecode(), ScriptedDecode("decode-1")
    async with registered(mute, decode, timeout=0.1) as registry:
        await until(lambda: registry.decode[1].state is NodeState.LIVE)
        assert registry.decode[0].state is NodeState.CONNECTING


class TwoAddresses(ScriptedDecode):
    """A node that cannot be reached at either address of its name, which are tried in turn."""

    num_tries = 0

    async def Describe(self, request: node_pb2.DescribeRequest, context: object) -> node_pb2.DescribeResponse:
        self.num_tries += 1
        raise UnavailableError(f"nobody at address {self.num_tries % 2}")


async def test_each_reason_for_which_a_node_is_not_reached_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    decode = TwoAddresses()
    with caplog.at_level(logging.WARNING):
        async with registered(decode):
            await until(lambda: decode.num_tries >= 5)
    assert [caplog.text.count(f"nobody at address {number}") for number in (0, 1)] == [1, 1]


async def test_a_majority_that_comes_later_does_not_replace_what_is_live() -> None:
    """Nor does it keep others out that fit what is live."""
    nodes, late = [ScriptedDecode(f"decode-{number}") for number in range(4)], ScriptedDecode("late")
    async with registered(*nodes, late=late) as registry:
        first, *others, last = registry.decode
        await until(lambda: all(node.state is NodeState.LIVE for node in (first, *others)))
        for node in nodes[1:]:
            await node.stop()
            node.namespace = replace(NAMESPACE, block_size=32)
        await until(lambda: all(node.state is NodeState.LOST for node in others))
        for node in nodes[1:]:
            await node.start_again(epoch=2)
        await until(lambda: all(node.state is NodeState.REFUSED for node in others))
        assert registry.served_model().kv_namespace == NAMESPACE
        await late.start()
        await until(lambda: last.state is not NodeState.CONNECTING)
        assert last.state is NodeState.LIVE


async def test_a_node_that_others_were_live_before_is_checked_against_them() -> None:
    """Nothing was live when it described itself, and it has said nothing since."""
    slow, other = ScriptedPrefill(), ScriptedDecode()
    slow.updates.get_nowait()
    other.namespace = replace(NAMESPACE, block_size=32)
    async with registered(slow, late=other, silence=PATIENCE) as registry:
        await soon(slow.watch_requests)
        await other.start()
        await until(lambda: registry.decode[0].state is NodeState.LIVE)
        slow.update(0, reset=True)
        await until(lambda: registry.prefill[0].state is not NodeState.CONNECTING)
        assert registry.prefill[0].state is NodeState.REFUSED


async def test_an_epoch_that_changes_within_a_stream_is_asked_about() -> None:
    decode = ScriptedDecode()
    async with registered(decode) as registry:
        await settled(registry)
        await soon(decode.watch_requests)
        decode.epoch = 2
        decode.update(1, stored=[A], epoch=2)  # ends the stream, unapplied
        await soon(decode.watch_requests)
        decode.update(0, reset=True)
        await until(lambda: registry.decode[0].state is NodeState.LIVE)
        description = registry.decode[0].description
        assert description is not None and description.source.epoch == 2
        assert registry.index.leading([A]) == {}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_fingerprint": b"\x02" * 32}, "--dtype and --quantization) is 0202020202020202, not 0101010101010101"),
        ({"kv_dtype": "bfloat16"}, "KV dtype is bfloat16, not float32"),
        ({"block_size": 32}, "block size is 32, not 4"),
        ({"layout_id": "other"}, "KV layout is other, not test-layout"),
    ],
)
async def test_a_node_with_other_kv_is_refused_with_the_reason(
    change: dict[str, object], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    decode, stranger = ScriptedDecode(), ScriptedDecode("decode-1")
    stranger.namespace = replace(NAMESPACE, **change)  # type: ignore[arg-type]
    await refused(decode, stranger, complaint, caplog)


async def test_no_election_is_held_for_a_node_that_joins_live_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those decide, and in an election all nodes are compared with each other."""
    decode, late = ScriptedDecode(), ScriptedDecode("late")
    async with registered(decode, late=late) as registry:
        await until(lambda: registry.decode[0].state is NodeState.LIVE)
        held: list[float] = []
        monkeypatch.setattr(fit, "elect", lambda nodes, now: held.append(now))
        await late.start()
        await until(lambda: registry.decode[1].state is NodeState.LIVE)
        assert not held


async def test_a_node_with_another_connector_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    decode, stranger = ScriptedDecode(), ScriptedDecode("decode-1")
    stranger.connector = "redis"
    await refused(decode, stranger, "connector is redis, not in_process", caplog)


async def test_a_node_with_another_vocabulary_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    decode, stranger = ScriptedDecode(), ScriptedDecode("decode-1")
    stranger.vocab_size = 999
    await refused(decode, stranger, "vocabulary size is 999, not 1000", caplog)


async def test_a_node_with_other_end_tokens_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    decode, stranger = ScriptedDecode(), ScriptedDecode("decode-1")
    stranger.eos_token_ids = [2, 7]
    await refused(decode, stranger, "and of tokenizer_config.json) is [2, 7], not [2]", caplog)


async def test_a_node_of_another_protocol_is_refused_and_decides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Listed first, it would be the one that the others have to fit, whose KV is different."""
    stranger, decode = ScriptedDecode(), ScriptedDecode("decode-1")
    stranger.protocol, stranger.namespace = 0, replace(NAMESPACE, block_size=32)
    with caplog.at_level(logging.WARNING):
        async with registered(stranger, decode) as registry:
            await settled(registry)
            assert [node.state for node in registry.decode] == [NodeState.REFUSED, NodeState.LIVE]
    assert f"protocol is 0, but this router's is {PROTOCOL}: run versions of kvrelay that share one" in caplog.text


async def test_a_node_with_another_tokenizer_than_the_routers_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """One that says nothing of its tokenizer may have none, and is taken."""
    stranger, fine, silent = (ScriptedDecode(f"decode-{number}") for number in range(3))
    stranger.vocabulary, fine.vocabulary = b"theirs", b"ours"
    with caplog.at_level(logging.WARNING):
        async with registered(stranger, fine, silent, vocabulary=b"ours") as registry:
            await settled(registry)
            assert [node.state for node in registry.decode] == [NodeState.REFUSED, NodeState.LIVE, NodeState.LIVE]
    assert "its tokenizer gives ids to other tokens than this router's: start both with the same model" in caplog.text


async def test_nodes_that_share_one_of_their_connectors_fit() -> None:
    decode, another = ScriptedDecode(), ScriptedDecode("decode-1")
    decode.connector, another.connector = "shared_memory,redis", "ucx,redis"
    async with registered(decode, another) as registry:
        await settled(registry)
        assert len(registry.live(NodeRole.DECODE)) == 2


async def test_a_node_of_another_host_is_refused_if_both_have_only_mapped_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decode, stranger = ScriptedDecode(), ScriptedDecode("decode-1")
    for node, host in ((decode, "0" * 16), (stranger, "f" * 16)):
        node.connector = "shared_memory"
        node.endpoint = f"host={host};shared_memory=kvrelay-{node.node_id}-0000000000000001.kv"
    complaint = f"host is {'f' * 16}, not {'0' * 16}, and all they share is shared_memory, which reaches no other host"
    await refused(decode, stranger, complaint, caplog)
    assert "set --connector shared_memory,ucx or redis for both" in caplog.text


async def test_two_nodes_of_one_id_are_not_both_let_in(caplog: pytest.LogCaptureFixture) -> None:
    await refused(ScriptedDecode(), ScriptedDecode(), "node_id 'decode-0' is that of 127.0.0.1", caplog)


async def test_a_node_that_was_refused_for_its_id_takes_no_blocks_along_when_it_gets_another() -> None:
    first, second = ScriptedDecode("same"), ScriptedDecode("same")
    async with registered(first, second) as registry:
        await settled(registry)
        assert [node.state for node in registry.decode] == [NodeState.LIVE, NodeState.REFUSED]
        first.update(1, stored=[A, B])
        await until(lambda: registry.index.leading([A, B]) == {"same": 2})
        await second.stop()
        second.node_id, second.updates = "other", asyncio.Queue()
        await second.start_again(epoch=2)
        await until(lambda: registry.decode[1].state is NodeState.LIVE)
        assert registry.index.leading([A, B]) == {"same": 2}


async def test_a_node_that_drains_keeps_its_id_until_it_has_ended() -> None:
    """Its blocks would be taken for those of a successor at another address. Back after it, it is asked for all."""
    first, second = ScriptedDecode("same"), ScriptedDecode("same")
    async with registered(first, late=second) as registry:
        await until(lambda: registry.decode[0].state is NodeState.LIVE)
        first.update(1, stored=[A], draining=True)
        await until(lambda: registry.decode[0].state is NodeState.DRAINING)
        await second.start()
        await until(lambda: registry.decode[1].state is NodeState.REFUSED)
        assert registry.index.leading([A]) == {"same": 1}
        await first.stop()
        second.update(0, reset=True)
        await until(lambda: registry.decode[1].state is NodeState.LIVE)
        assert registry.index.leading([A]) == {}
        await soon(first.watch_requests)
        await second.stop()
        await until(lambda: registry.decode[1].state is NodeState.LOST)
        await first.start()  # it had only been cut off
        request = await soon(first.watch_requests)
        assert (request.epoch, request.after_sequence) == (0, 0), "the index has forgotten what it held"


async def refused(
    first: ScriptedNode, stranger: ScriptedNode, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Asserts that a node that comes when `first` is live is refused with this complaint."""
    with caplog.at_level(logging.WARNING):
        async with registered(first, late=stranger) as registry:
            await until(lambda: registry.decode[0].state is NodeState.LIVE)
            await stranger.start()
            await until(lambda: registry.decode[1].state is NodeState.REFUSED)
            assert complaint in caplog.text
            assert [node.address for node in registry.live(NodeRole.DECODE)] == [first.address]


async def test_a_node_of_the_wrong_kind_is_refused_and_let_in_when_it_was_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    right, prefill.role = prefill.role, decode.role
    with caplog.at_level(logging.WARNING):
        async with registered(prefill, decode) as registry:
            await settled(registry)
            assert registry.prefill[0].state is NodeState.REFUSED
            assert "role is decode, but it is listed among the prefill nodes" in caplog.text
            prefill.role = right
            await until(lambda: registry.prefill[0].state is NodeState.LIVE)


async def test_a_refused_node_that_has_ended_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """Why it was refused would otherwise be the alert for as long as it is away, and no reason would be given."""
    prefill, decode = ScriptedPrefill(), ScriptedDecode()
    prefill.role = decode.role
    with caplog.at_level(logging.WARNING):
        async with registered(prefill, decode) as registry:
            [handle] = registry.prefill
            await until(lambda: handle.state is NodeState.REFUSED)
            await prefill.stop()
            await until(lambda: handle.state is NodeState.LOST and handle.complaint != "")
            assert f"({prefill.address}) is refused: role is decode" in caplog.text
            assert f"({prefill.address}) is refused: Connection" not in caplog.text
            await prefill.start()
            await until(lambda: caplog.text.count(f"({prefill.address}) is refused: role is decode") == 2)


async def test_a_node_that_is_not_there_is_found_when_it_comes() -> None:
    decode, late = ScriptedDecode(), ScriptedDecode("decode-1")
    async with registered(decode, late=late) as registry:
        await until(lambda: registry.decode[0].state is NodeState.LIVE)
        assert registry.decode[1].state is NodeState.CONNECTING
        await until(lambda: registry.decode[1].complaint != "")
        await late.start()
        await until(lambda: registry.decode[1].state is NodeState.LIVE)
        assert not registry.decode[1].complaint


async def test_a_node_that_cannot_be_reached_keeps_no_router_waiting_that_can_serve() -> None:
    late_decode, late_prefill = ScriptedDecode(), ScriptedPrefill()
    async with registered(late=late_decode) as registry:
        await until(lambda: registry.decode[0].complaint != "")
        waiting = asyncio.create_task(registry.wait_settled())
        await until(lambda: registry.decode[0].state is NodeState.CONNECTING and not waiting.done())
        await late_decode.start()
        await asyncio.wait_for(waiting, PATIENCE)
        assert registry.can_serve()
    async with registered(ScriptedDecode("decode-1"), late=late_prefill) as registry:
        await asyncio.wait_for(registry.wait_settled(), PATIENCE)
        assert registry.can_serve() and registry.prefill[0].state is NodeState.CONNECTING


async def test_a_node_that_has_described_itself_is_waited_for_until_it_is_live() -> None:
    decode, slow = ScriptedDecode(), ScriptedPrefill()
    slow.updates.get_nowait()
    async with registered(decode, slow, silence=PATIENCE) as registry:
        waiting = asyncio.create_task(registry.wait_settled())
        await until(lambda: registry.can_serve())
        await asyncio.wait({waiting}, timeout=0.1)
        assert not waiting.done() or registry.prefill[0].complaint, "as on a busy machine, where it may not be reached"
        slow.update(0, reset=True)
        await asyncio.wait_for(waiting, PATIENCE)
