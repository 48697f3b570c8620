"""The nodes' state, load and counters as the router last heard of them, so that its `/metrics` shows the whole cluster.

They are read from the node table at scrape time; nothing is kept here.
"""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvrelay.core.node_report import NodeLoad, NodeRole
from router.nodes.node import NodeHandle, NodeState
from router.nodes.registry import Registry

_LABELS = ("node", "role")
_EJECTED = "ejected"  # live, but it gets no requests
_STATES = (*(state.value for state in NodeState), _EJECTED)
_Labelled = tuple[tuple[str, str], NodeHandle]

# Gauges of a node's load, which are absent while nobody knows it.
_LOAD: tuple[tuple[str, str, Callable[[NodeLoad], float]], ...] = (
    ("node_requests_running", "Sequences that run or receive KV.", lambda load: load.num_requests_running),
    ("node_requests_waiting", "Sequences that wait for a step.", lambda load: load.num_requests_waiting),
    (
        "node_queued_tokens",
        "Prompt tokens to compute, cached ones of requests that wait among them.",
        lambda load: load.num_queued_tokens,
    ),
    ("node_leases", "Requests whose published blocks are kept.", lambda load: load.num_leases),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda load: load.kv_cache_usage),
)


# Counters of connectors: name at the node, name in `/metrics`, help text.
_CONNECTOR_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("blocks_published", "kv_blocks_published", "KV blocks that peers can fetch from here."),
    ("bytes_published", "kv_bytes_published", "Bytes of them."),
    ("blocks_fetched", "kv_blocks_fetched", "KV blocks that were fetched and verified: the hits."),
    ("bytes_fetched", "kv_bytes_fetched", "Bytes of them."),
    ("fetch_seconds", "kv_fetch_seconds", "Time spent fetching; fetches at a time count each."),
    ("missing", "kv_blocks_missing", "KV blocks that the source did not hold: the misses."),
    ("failed", "kv_blocks_failed", "KV blocks that could not be moved, in either direction."),
    ("skipped", "kv_blocks_skipped", "Of the failed ones, those for which a failing store or holder was not asked."),
    ("lost_unstored", "kv_blocks_lost_unstored", "KV blocks that lost their content before they were stored."),
    ("not_worth", "kv_blocks_not_worth_fetching", "KV blocks that were computed because that is faster."),
    ("quarantined", "kv_blocks_quarantined", "Destinations kept past a fetch's deadline until nothing wrote to them."),
    ("peers_refused", "kv_peers_refused", "Connections dropped: a broken protocol, or not of this cluster."),
)


class NodeMetrics(Collector):
    """A collector for the router's CollectorRegistry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        nodes = _labelled(self._registry.nodes)
        up = GaugeMetricFamily("kvrelay:node_up", "1 while the node is live or ejected.", labels=_LABELS)
        for labels, node in nodes:
            up.add_metric(labels, float(node.state is NodeState.LIVE))
        yield up
        for name, text, value in _LOAD:
            family = GaugeMetricFamily(f"kvrelay:{name}", text, labels=_LABELS)
            for labels, node in nodes:
                if node.is_watched:
                    family.add_metric(labels, value(node.load))
            yield family
        text = "KV blocks of all nodes together that this router knows of."
        yield GaugeMetricFamily("kvrelay:kv_index_blocks", text, value=len(self._registry.index))
        yield self._links(nodes)
        yield self._states(nodes)
        yield self._heartbeats(nodes)
        yield from _counters(nodes)
        yield from _connector_counters(nodes)

    def _states(self, nodes: Sequence[_Labelled]) -> Metric:
        family = GaugeMetricFamily("kvrelay:node_state", "1 for the state the node is in.", labels=(*_LABELS, "state"))
        for labels, node in nodes:
            found = _EJECTED if self._registry.is_ejected(node) else node.state.value
            for state in _STATES:
                family.add_metric((*labels, state), float(state == found))
        return family

    def _links(self, nodes: Sequence[_Labelled]) -> Metric:
        text = "Prefill nodes whose KV does not get to the decode node."
        family = GaugeMetricFamily("kvrelay:node_links_broken", text, labels=_LABELS)
        known = {node.source for node in self._registry.prefill if node.is_watched}
        for labels, node in nodes:
            if node.is_watched and node.role is NodeRole.DECODE:
                family.add_metric(labels, len(known.intersection(node.links.failing())))
        return family

    def _heartbeats(self, nodes: Sequence[_Labelled]) -> Metric:
        text = "Seconds since the node was last heard of; absent when it never was."
        family = GaugeMetricFamily("kvrelay:node_heartbeat_age_seconds", text, labels=_LABELS)
        for labels, node in nodes:
            if node.heard_at is not None:
                family.add_metric(labels, self._registry.clock.now() - node.heard_at)
        return family


def _counters(nodes: Sequence[_Labelled]) -> Iterable[Metric]:
    preemptions = CounterMetricFamily("kvrelay:num_preemptions", "Sequences preempted.", labels=_LABELS)
    steps = CounterMetricFamily(
        "kvrelay:node_steps",
        "Steps of the engine, with the node's own cores or also with lent ones.",
        labels=(*_LABELS, "cores"),
    )
    ejections = CounterMetricFamily("kvrelay:node_ejections", "Times it failed too many requests.", labels=_LABELS)
    leases = CounterMetricFamily(
        "kvrelay:node_leases_ended", "Leases that were released, expired, or ended early.", labels=(*_LABELS, "how")
    )
    for labels, node in nodes:
        preemptions.add_metric(labels, node.load.num_preemptions)
        steps.add_metric((*labels, "own"), node.load.num_steps - node.load.num_borrowing_steps)
        steps.add_metric((*labels, "lent"), node.load.num_borrowing_steps)
        ejections.add_metric(labels, node.outlier.num_ejections)
        leases.add_metric((*labels, "released"), node.stats.num_leases_released)
        leases.add_metric((*labels, "expired"), node.stats.num_leases_expired)
        leases.add_metric((*labels, "early"), node.stats.num_leases_ended_early)
    return preemptions, steps, ejections, leases


def _connector_counters(nodes: Sequence[_Labelled]) -> Iterable[Metric]:
    backends = [((*labels, found.connector), found) for labels, node in nodes for found in node.stats.connectors]
    for counter, name, text in _CONNECTOR_COUNTERS:
        family = CounterMetricFamily(f"kvrelay:{name}", text, labels=(*_LABELS, "connector"))
        for labels, found in backends:
            if counter in found.counters:
                family.add_metric(labels, found.counters[counter])
        yield family
    refused = CounterMetricFamily(
        "kvrelay:kv_blocks_refused", "KV blocks that did not verify, by cause.", labels=(*_LABELS, "connector", "cause")
    )
    for labels, found in backends:
        for cause, count in found.refused.items():
            refused.add_metric((*labels, cause), count)
    yield refused


def _labelled(nodes: Sequence[NodeHandle]) -> list[_Labelled]:
    """Returns each node with its labels. The label `node` is the node's id; it is the address while the id is unknown
    or if another node has the same id and comes first. Live and draining nodes come first."""
    taken: set[str] = set()
    labelled = []
    for node in sorted(nodes, key=lambda node: not node.is_watched):
        name = node.address if node.description is None else node.description.source.node_id
        name = node.address if name in taken else name
        taken.add(name)
        labelled.append(((name, node.role.value), node))
    return labelled
