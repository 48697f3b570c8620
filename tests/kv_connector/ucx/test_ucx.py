"""UCX between real processes: no harm comes from peers that are dead, stopped, lying or no members of the cluster."""

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from kv_connector.base import FetchOutcome, FetchOutcomes
from kv_connector.header import Mismatch
from kv_connector.settings import UcxSettings
from kv_connector.ucx import reader as reader_module
from kv_connector.ucx import transport as transport_module
from kv_connector.ucx.connector import UcxConnector
from kv_connector.ucx.holder import HANDSHAKE_SECONDS
from kv_connector.ucx.protocol import OPENING_BYTES, PROOF_BYTES, encode_opening
from kv_connector.ucx.transport import Link, LinkLostError, Transport
from kvrelay.core.kv.named_block import NamedBlock
from kvrelay.core.kv.source import KVSource
from tests.kv_connector.backends import (
    CLUSTER_SECRET,
    EPOCH,
    LAYOUT,
    OTHER_LAYOUT,
    DirectNode,
    Node,
    blocks,
    content,
    moved,
    write_and_publish,
)
from tests.kv_connector.owner_process import OwnerProcess
from tests.kv_connector.ucx.owner import LARGE_LAYOUT, NUM_BLOCKS
from tests.kv_connector.ucx.peers import peers_of, ucx_node
from tests.kv_connector.ucx.stubborn_request import StubbornRequest
from tests.manual_clock import ManualClock

FETCHED, MISSING, REFUSED, FAILED = FetchOutcome


@pytest.fixture
def child() -> Iterator[OwnerProcess]:
    """Starts a holder in another process, with blocks large enough to be stopped in the middle of one."""
    started = OwnerProcess("ucx.owner")
    yield started
    started.kill()


@pytest.fixture
async def peer() -> AsyncIterator[Node]:
    made = ucx_node("peer", layout=LARGE_LAYOUT)
    yield made
    await made.connector.close()


@pytest.fixture
async def holder() -> AsyncIterator[Node]:
    made = ucx_node("holder", num_blocks=512)
    await write_and_publish(made, blocks(512))
    yield made
    await made.connector.close()


async def first_bytes(peer: Node, block_id: int, fetch: "asyncio.Task[FetchOutcomes]") -> None:
    """Returns when a block has begun to arrive; fails when the fetch has ended before."""
    row = np.frombuffer(peer.row(block_id), np.uint8)
    while not row[::4096].any():
        assert not fetch.done(), fetch.result()
        await asyncio.sleep(0)


def clear(peer: Node) -> None:
    np.frombuffer(peer.pool.memory, np.uint8)[:] = 0


def is_clear(peer: Node) -> bool:
    return not np.frombuffer(peer.pool.memory, np.uint8).any()


async def test_blocks_arrive_from_another_process(child: OwnerProcess, peer: Node) -> None:
    result = await peer.connector.fetch(child.source, blocks(NUM_BLOCKS), timeout=30)
    assert set(result) == {FETCHED}
    for block in blocks(NUM_BLOCKS):
        assert peer.row(block.block_id) == content(block.block_hash, LARGE_LAYOUT.block_bytes)


async def test_a_killed_holder_fails_at_once(child: OwnerProcess, peer: Node) -> None:
    fetch = asyncio.create_task(peer.connector.fetch(child.source, blocks(NUM_BLOCKS), timeout=60))
    await first_bytes(peer, 1, fetch)
    child.signal(signal.SIGKILL)
    started = time.monotonic()
    result = await fetch
    assert result[-1] is FAILED and time.monotonic() - started < 5
    clear(peer)
    result = await peer.connector.fetch(child.source, blocks(2), timeout=60)
    assert set(result) == {FAILED} and time.monotonic() - started < 10
    assert is_clear(peer) and peer.first_stats.quarantined == 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_stopped_holder_writes_nothing_later(child: OwnerProcess, peer: Node, cancelled: bool) -> None:
    """It is stopped in the middle of a block. When it continues, its connections are cut and it writes nothing here."""
    wanted = blocks(NUM_BLOCKS)
    fetch = asyncio.create_task(peer.connector.fetch(child.source, wanted, timeout=30))
    await first_bytes(peer, 1, fetch)
    child.signal(signal.SIGSTOP)
    if cancelled:
        fetch.cancel()
        await asyncio.wait([fetch], timeout=5)
        assert fetch.cancelled()
    else:
        assert isinstance(peer.connector, UcxConnector)
        [under_way] = peer.connector._require().fetches
        under_way._deadline.reschedule(asyncio.get_running_loop().time())  # a short one might be over before the stop
        assert (await asyncio.wait_for(fetch, 5))[-1] is FAILED
    clear(peer)
    stopped = await asyncio.wait_for(peer.connector.fetch(child.source, wanted[:1], timeout=0.2), 5)
    assert stopped == (FAILED,)  # the kernel accepts for it, nobody answers
    child.signal(signal.SIGCONT)
    again = await peer.connector.fetch(child.source, moved(wanted[:1], NUM_BLOCKS - 1), timeout=30)
    assert again == (FETCHED,)  # behind whatever it had to send before
    np.frombuffer(peer.row(NUM_BLOCKS - 1), np.uint8)[:] = 0
    assert is_clear(peer) and peer.first_stats.quarantined == 0


async def test_a_holder_that_never_answers_is_left_alone_for_a_while(child: OwnerProcess) -> None:
    """Otherwise one that the network does not reach would cost every request a timeout."""
    clock = ManualClock()
    peer = Node(UcxConnector(UcxSettings(CLUSTER_SECRET), clock=clock), "peer", NUM_BLOCKS, LARGE_LAYOUT, EPOCH)

    async def fetch(timeout: float) -> FetchOutcomes:
        return await peer.connector.fetch(child.source, blocks(1), timeout=timeout)

    child.signal(signal.SIGSTOP)
    for timeout in (0.1, 1.0):  # the first is too short to say anything
        assert await asyncio.gather(*(fetch(timeout) for _ in range(3))) == [(FAILED,)] * 3
        assert peer.first_stats.skipped == 0
    assert await asyncio.wait_for(fetch(60), 5) == (FAILED,) and peer.first_stats.skipped == 1
    child.signal(signal.SIGCONT)
    clock.seconds += 0.5
    assert await fetch(30) == (FETCHED,) and peer.first_stats.skipped == 1
    await peer.connector.close()


async def test_a_holder_that_accepts_and_says_nothing_is_given_up_before_the_fetch_is_over(
    child: OwnerProcess, peer: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of its time is for another way to get the blocks."""
    monkeypatch.setattr(reader_module, "HANDSHAKE_SECONDS", 0.05)
    child.signal(signal.SIGSTOP)
    fetch = peer.connector.fetch(child.source, blocks(2), timeout=60)
    assert set(await asyncio.wait_for(fetch, 10)) == {FAILED}


async def test_one_slow_holder_does_not_hold_up_another(child: OwnerProcess) -> None:
    fast, reader = (ucx_node(name, layout=LARGE_LAYOUT) for name in ("fast", "reader"))
    sent = blocks(2, tag="fast")
    await write_and_publish(fast, sent)
    child.signal(signal.SIGSTOP)
    stuck = asyncio.create_task(reader.connector.fetch(child.source, blocks(4), timeout=60))
    for _ in range(3):
        assert set(await reader.connector.fetch(fast.source, moved(sent, 8), timeout=30)) == {FETCHED}
    assert not stuck.done()
    assert isinstance(reader.connector, UcxConnector)
    under_way = reader.connector._require().fetches
    await reader.connector.close()  # fails what is under way, and leaves nothing
    assert not under_way
    assert set(await stuck) == {FAILED}
    await fast.connector.close()


async def test_a_wrong_secret_gets_nothing_and_both_logs_say_why_once(
    holder: Node, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = ucx_node("stranger", secret="another cluster's secret")
    for _ in range(2):
        result = await stranger.connector.fetch(holder.source, blocks(3), timeout=10)
        assert set(result) == {FAILED} and is_clear(stranger)
    assert holder.first_stats.peers_refused == 2
    await stranger.connector.close()
    for line in (
        "dropped a UCX peer: the peer has another cluster secret",
        "fetching from node holder failed: it left after our proof: has it the same cluster secret?",
    ):
        assert caplog.text.count(line) == 1


async def test_a_holder_that_can_not_prove_itself_is_not_believed(peer: Node) -> None:
    """It replays the reader's messages, which prove nothing without the secret and our nonce."""
    transport = Transport("")
    links: list[Link] = []

    async def parrot(link: Link) -> None:
        links.append(link)
        link.greet(await link.greeting(OPENING_BYTES))
        proof = await link.greeting(PROOF_BYTES)
        link.greet(proof[:24] + EPOCH.to_bytes(8, "little") + proof[24:])

    tasks: list[asyncio.Task[None]] = []
    listener, port = transport.listen(lambda link: tasks.append(asyncio.create_task(parrot(link))))
    fetch = peer.connector.fetch(KVSource("parrot", EPOCH, f"127.0.0.1:{port}"), blocks(2), timeout=60)
    result = await asyncio.wait_for(fetch, 10)  # at once: it is asked for nothing
    assert set(result) == {FAILED} and is_clear(peer)
    await asyncio.gather(*tasks)
    async with asyncio.timeout(10):
        while any(link.alive for link in links):  # a connection that is not believed is not kept either
            await asyncio.sleep(0)
    del listener
    for link in links:
        await link.close()
    transport.close()


@pytest.mark.parametrize("opening", [bytes(40), encode_opening(bytes(32))[:4] + b"\xff" * 36, bytes(1 << 20)])
async def test_a_peer_that_breaks_the_protocol_is_dropped_and_counted(holder: Node, opening: bytes) -> None:
    transport = Transport("")
    host, _, port = holder.source.endpoint.rpartition(":")
    link = transport.connect(host, int(port))
    link.greet(opening)
    with pytest.raises(LinkLostError):
        await asyncio.wait_for(link.greeting(OPENING_BYTES), 10)
    assert holder.first_stats.peers_refused == 1
    await link.close()
    transport.close()


async def test_what_has_not_the_shape_of_ucx_harms_nobody_on_its_port(holder: Node) -> None:
    """What has may: UCX checks nothing further, so that strangers have to be kept from the port."""
    host, _, port = holder.source.endpoint.rpartition(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"\xff" * 64, np.random.default_rng(0).bytes(100_000)):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(garbage)
    reader = ucx_node("reader")
    assert set(await reader.connector.fetch(holder.source, blocks(20), timeout=10)) == {FETCHED}
    await reader.connector.close()


async def test_an_address_without_a_holder_fails_every_block(peer: Node) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{free.getsockname()[1]}"
    nowhere = ("", "nonsense", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:x", "no-such-host.invalid:7", "a..b:7")
    for endpoint in (closed, *nowhere, f"{'x' * 64}:7"):
        result = await asyncio.wait_for(peer.connector.fetch(KVSource("x", 1, endpoint), blocks(2), timeout=5), 20)
        assert set(result) == {FAILED}


async def test_a_holder_that_restarted_is_refused_by_its_epoch(holder: Node) -> None:
    reader = ucx_node("reader")
    stale = KVSource("holder", EPOCH - 1, holder.source.endpoint)
    assert set(await reader.connector.fetch(stale, blocks(9), timeout=10)) == {REFUSED}
    assert reader.first_stats.refused[Mismatch.EPOCH] == 9 and is_clear(reader)
    lanes = list(peers_of(reader)[0]._idle)
    assert set(await reader.connector.fetch(holder.source, blocks(9), timeout=10)) == {FETCHED}
    assert isinstance(holder.connector, UcxConnector)
    side = holder.connector._require().holder
    assert peers_of(reader)[0]._idle == lanes, "the connection is the same"
    assert (len(side._tasks), side._strangers) == (1, 0), "and proven"
    await reader.connector.close()


async def test_a_reader_with_another_layout_leaves_and_is_no_stranger(holder: Node) -> None:
    reader = ucx_node("reader", layout=OTHER_LAYOUT)
    for source in (holder.source, KVSource("holder", EPOCH - 1, holder.source.endpoint)):
        assert set(await reader.connector.fetch(source, blocks(9), timeout=10)) == {REFUSED}
    assert reader.first_stats.refused[Mismatch.LAYOUT] == reader.first_stats.refused[Mismatch.EPOCH] == 9
    assert isinstance(holder.connector, UcxConnector)
    async with asyncio.timeout(HANDSHAKE_SECONDS / 2):
        while holder.connector._require().holder._tasks:
            await asyncio.sleep(0.01)
    assert holder.first_stats.peers_refused == 0
    await reader.connector.close()


async def test_a_flipped_byte_in_the_holders_memory_is_refused(holder: Node) -> None:
    reader = ucx_node("reader")
    holder.row(5)[100] ^= 4
    result = await reader.connector.fetch(holder.source, blocks(8), timeout=10)
    assert [index for index, outcome in enumerate(result) if outcome is REFUSED] == [5]
    assert reader.first_stats.refused[Mismatch.DIGEST] == 1
    await reader.connector.close()


async def test_a_fetch_goes_on_when_ucx_misses_every_wake_up(holder: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_module, "_GUARD_SECONDS", 0.001)
    reader = ucx_node("reader")
    assert isinstance(reader.connector, UcxConnector)
    asyncio.get_running_loop().remove_reader(reader.connector._require().transport._fd)
    assert set(await reader.connector.fetch(holder.source, blocks(20), timeout=10)) == {FETCHED}
    await reader.connector.close()


async def test_a_small_fetch_overtakes_a_large_one(holder: Node) -> None:
    reader = ucx_node("reader", num_blocks=512)
    done: list[str] = []

    async def fetch(name: str, wanted: list[NamedBlock]) -> None:
        result = await reader.connector.fetch(holder.source, wanted, timeout=30)
        assert set(result) == {FETCHED}
        done.append(name)

    assert isinstance(reader.connector, UcxConnector)
    large = asyncio.create_task(fetch("large", blocks(512)[:500]))
    await asyncio.sleep(0)
    small = asyncio.create_task(fetch("small", blocks(512)[500:501]))
    uses_all_lanes = False
    while not large.done() or not small.done():
        await asyncio.sleep(0)
        uses_all_lanes |= any(peer._turns.locked() for peer in peers_of(reader))
    await asyncio.gather(large, small)
    assert done == ["small", "large"]
    assert uses_all_lanes
    await reader.connector.close()


async def test_a_fetch_waits_for_buffers_that_ucx_still_holds(holder: Node) -> None:
    reader = ucx_node("reader")
    await reader.connector.fetch(holder.source, blocks(1), timeout=10)
    [lane] = peers_of(reader)[0]._idle
    stubborn = StubbornRequest()
    lane.link._posted.append((stubborn, None, None))
    result = asyncio.create_task(reader.connector.fetch(holder.source, blocks(3), timeout=0.05))
    while not reader.first_stats.quarantined:
        await asyncio.sleep(0.001)
    for _ in range(3):
        result.cancel()
        await asyncio.sleep(0.001)
        assert not result.done()
    stubborn.completed = True
    await asyncio.wait([result], timeout=10)
    assert result.cancelled() and reader.first_stats.quarantined == 3
    await reader.connector.close()


@pytest.mark.parametrize("cancelled_over", ["ucx", "the device"])
async def test_a_fetch_of_a_dead_holder_waits_for_ucx_and_then_for_the_device(
    holder: Node, cancelled_over: str
) -> None:
    """Also one that is cancelled, while UCX still holds its buffers or while the device has other things to do."""
    reader = DirectNode(UcxConnector(UcxSettings(CLUSTER_SECRET)), "reader", 16, LAYOUT, EPOCH)
    await reader.connector.fetch(holder.source, blocks(1), timeout=10)
    [lane] = peers_of(reader)[0]._idle
    stubborn = StubbornRequest()
    lane.link._posted.append((stubborn, None, None))
    fetch = asyncio.create_task(reader.connector.fetch(holder.source, blocks(3), timeout=30))
    await asyncio.sleep(0)
    await holder.connector.close()
    while not reader.first_stats.quarantined:
        await asyncio.sleep(0.001)
    reader.device.waiting.clear()
    reader.device.gate.clear()
    other = asyncio.create_task(reader.device_pool.digests([0]))
    await asyncio.to_thread(reader.device.waiting.wait, 10)
    if cancelled_over == "ucx":
        fetch.cancel()
        await asyncio.sleep(0.001)
    stubborn.completed = True
    for turn in range(100):
        if cancelled_over == "the device" and turn == 50:
            fetch.cancel()
        await asyncio.sleep(0.001)
        assert not fetch.done()
    reader.device.gate.set()
    await asyncio.wait([fetch, other], timeout=10)
    assert fetch.cancelled() and reader.device.num_quiesced == 1
    await reader.close()
