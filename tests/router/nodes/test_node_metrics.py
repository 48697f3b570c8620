"""What `/metrics` shows of nodes: their state, load and counters, as the router last heard of them."""

from contextlib import AsyncExitStack
from dataclasses import fields, replace
from random import Random

from prometheus_client import CollectorRegistry

from kv_connector.stats import ConnectorStats
from kvrelay.core.errors import KVRelayError
from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.node_report import NOTHING_FETCHED
from kvrelay.v1 import node_pb2
from router.nodes.kv_index import KVIndex
from router.nodes.node import NodeState
from router.nodes.node_metrics import NodeMetrics
from router.nodes.outlier import Outlier
from router.nodes.registry import Registry
from tests.manual_clock import ManualClock
from tests.router.scripted_cluster import cluster, registered, settled
from tests.router.scripted_nodes import PATIENCE, ScriptedDecode, until


async def test_everything_of_a_node_is_in_the_metrics() -> None:
    async with cluster(silence=30.0) as nodes:
        collectors = CollectorRegistry()
        collectors.register(NodeMetrics(nodes.registry))
        stats = node_pb2.NodeStats(num_leases_released=7, num_leases_expired=2, num_leases_ended_early=1)
        connector = stats.connectors.add(connector="ucx", counters={"bytes_fetched": 4096, "missing": 3, "new": 1})
        connector.refused["digest"] = 5
        nodes.prefill.updates.put_nowait(
            node_pb2.WatchResponse(
                epoch=1, load=node_pb2.NodeLoad(num_leases=4, num_steps=9, num_borrowing_steps=2), stats=stats
            )
        )
        await until(lambda: nodes.registry.prefill[0].load.num_leases == 4)

        def value(name: str, **labels: str) -> float | None:
            node = {"node": "prefill-0", "role": "prefill"}
            return collectors.get_sample_value(f"kvrelay:{name}", {**node, **labels})

        assert value("node_leases") == 4
        assert value("node_steps_total", cores="own") == 7
        assert value("node_steps_total", cores="lent") == 2
        assert value("node_leases_ended_total", how="released") == 7
        assert value("node_leases_ended_total", how="expired") == 2
        assert value("node_leases_ended_total", how="early") == 1
        assert value("kv_bytes_fetched_total", connector="ucx") == 4096
        assert value("kv_blocks_missing_total", connector="ucx") == 3
        assert value("kv_blocks_refused_total", connector="ucx", cause="digest") == 5
        assert value("node_state", state="live") == 1
        assert value("node_state", state="lost") == 0
        assert value("node_state", state="ejected") == 0
        assert value("node_ejections_total") == 0
        assert value("node_links_broken") is None
        for names, count in (([b"a" * 32, b"b" * 32], 2), ([b"b" * 32], 2), ([b"c" * 32], 3)):
            nodes.registry.index.stored("prefill-0", [BlockHash(name) for name in names])
            assert collectors.get_sample_value("kvrelay:kv_index_blocks") == count
        [decode], [prefill] = nodes.registry.decode, nodes.registry.prefill
        for _ in range(3):
            assert value("node_links_broken", node="decode-0", role="decode") == 0
            decode.links.begin(prefill.source, "decode-0").settle(NOTHING_FETCHED, lacks_blocks=True)
        assert value("node_links_broken", node="decode-0", role="decode") == 1
        source = replace(prefill.source, epoch=2)
        for _ in range(3):  # what has ended since is no link any more
            decode.links.begin(source, "decode-0").settle(NOTHING_FETCHED, lacks_blocks=True)
        assert value("node_links_broken", node="decode-0", role="decode") == 1
        age = value("node_heartbeat_age_seconds")
        assert age is not None and age >= 0
        load = node_pb2.NodeLoad(num_leases=3, num_free_blocks=750, num_blocks=1000)
        nodes.prefill.updates.put_nowait(node_pb2.WatchResponse(epoch=1, load=load))
        await until(lambda: nodes.registry.prefill[0].load.num_leases == 3)
        assert value("kv_cache_usage_perc") == 0.25
        assert value("node_leases_ended_total", how="released") == 7, "kept: a message without counters says nothing"
        await nodes.prefill.stop()
        await until(lambda: prefill.state is NodeState.LOST)
        assert value("node_links_broken", node="decode-0", role="decode") == 0, "what is broken is that node"


async def test_each_number_of_a_node_is_under_its_own_name() -> None:
    node = ScriptedDecode("decode-0")
    # A counter of the connector's, and what it is called in `/metrics`.
    names = {
        "blocks_published": "kv_blocks_published",
        "bytes_published": "kv_bytes_published",
        "blocks_fetched": "kv_blocks_fetched",
        "bytes_fetched": "kv_bytes_fetched",
        "fetch_seconds": "kv_fetch_seconds",
        "missing": "kv_blocks_missing",
        "failed": "kv_blocks_failed",
        "skipped": "kv_blocks_skipped",
        "lost_unstored": "kv_blocks_lost_unstored",
        "not_worth": "kv_blocks_not_worth_fetching",
        "quarantined": "kv_blocks_quarantined",
        "peers_refused": "kv_peers_refused",
    }
    assert set(names) == {field.name for field in fields(ConnectorStats)} - {"refused"}, "that one has a label `cause`"
    counters = {counter: number for number, counter in enumerate(names, start=100)}
    stats = node_pb2.NodeStats()
    stats.connectors.add(connector="ucx", counters=counters)
    load = node_pb2.NodeLoad(
        num_requests_running=1, num_requests_waiting=2, num_queued_tokens=3, num_leases=4, num_preemptions=5
    )
    async with registered(node) as registry:
        collectors = CollectorRegistry()
        collectors.register(NodeMetrics(registry))
        node.updates.put_nowait(node_pb2.WatchResponse(epoch=1, load=load, stats=stats))
        await until(lambda: bool(registry.decode[0].stats.connectors))

        def value(name: str, **labels: str) -> float | None:
            return collectors.get_sample_value(f"kvrelay:{name}", {"node": "decode-0", "role": "decode", **labels})

        assert [
            value("node_requests_running"),
            value("node_requests_waiting"),
            value("node_queued_tokens"),
            value("node_leases"),
            value("num_preemptions_total"),
        ] == [1, 2, 3, 4, 5]
        found = {counter: value(f"{name}_total", connector="ucx") for counter, name in names.items()}
        assert found == counters


async def test_an_ejected_node_is_up_and_in_a_state_of_its_own() -> None:
    async with registered(ScriptedDecode("bad"), ScriptedDecode("good")) as registry:
        await until(lambda: all(node.state is NodeState.LIVE for node in registry.nodes))
        bad = registry.decode[0]
        bad.outlier = Outlier("bad", ManualClock(), Random(0))  # so that its ejection does not end
        for _ in range(5):
            bad.outlier.failed(KVRelayError("out of luck"))
        families = {family.name: family for family in NodeMetrics(registry).collect()}
        states = [sample.labels for sample in families["kvrelay:node_state"].samples if sample.value]
        assert {labels["node"]: labels["state"] for labels in states} == {"bad": "ejected", "good": "live"}
        assert len(states) == 2
        assert [sample.value for sample in families["kvrelay:node_up"].samples] == [1, 1]


async def test_a_node_at_another_address_goes_on_with_the_series_of_its_id() -> None:
    """Its old address is known still, and listed before."""
    old, new = ScriptedDecode("same"), ScriptedDecode("same")
    async with registered(old, late=new) as registry:
        await until(lambda: registry.decode[0].state is NodeState.LIVE)
        await old.stop()
        await until(lambda: registry.decode[0].state is NodeState.LOST)
        await new.start()
        await until(lambda: registry.decode[1].state is NodeState.LIVE)
        up = next(family for family in NodeMetrics(registry).collect() if family.name == "kvrelay:node_up")
        assert {sample.labels["node"]: sample.value for sample in up.samples} == {"same": 1, old.address: 0}


async def test_a_node_has_a_load_while_it_reports_one() -> None:
    """What a lost node had when it was lost would look like a busy node for as long as it is away."""
    node = ScriptedDecode("decode-0")
    async with registered(node) as registry:
        [handle] = registry.decode
        collectors = CollectorRegistry()
        collectors.register(NodeMetrics(registry))

        def values(*names: str) -> list[float | None]:
            labels = {"node": "decode-0", "role": "decode"}
            return [collectors.get_sample_value(f"kvrelay:{name}", labels) for name in names]

        names = ("node_up", "node_requests_running", "kv_cache_usage_perc", "num_preemptions_total")
        load = node_pb2.NodeLoad(num_requests_running=2, num_free_blocks=750, num_blocks=1000, num_preemptions=3)
        node.updates.put_nowait(node_pb2.WatchResponse(epoch=1, load=load, draining=True))
        await until(lambda: handle.state is NodeState.DRAINING)
        assert values(*names) == [0, 2, 0.25, 3]
        await node.stop()
        await until(lambda: handle.state is NodeState.LOST)
        assert values(*names) == [0, None, None, 3]


async def test_two_addresses_of_one_id_are_two_series() -> None:
    """Prometheus refuses a whole scrape in which a series occurs twice."""
    one, two = ScriptedDecode(), ScriptedDecode()
    async with AsyncExitStack() as stack:
        for node in (one, two):
            await node.start()
            stack.push_async_callback(node.stop)
        registry = Registry([], [one.address, two.address], KVIndex(10), timeout=PATIENCE, silence=5.0)
        stack.push_async_callback(registry.close)
        registry.start()
        await settled(registry)
        assert [node.state for node in registry.nodes] == [NodeState.LIVE, NodeState.REFUSED]
        families = NodeMetrics(registry).collect()
        up = next(family for family in families if family.name == "kvrelay:node_up")
        assert [(sample.labels["node"], sample.value) for sample in up.samples] == [("decode-0", 1), (two.address, 0)]
