"""The nodes' own load as the router last heard of it, for `/metrics`: one scrape target shows the whole cluster.

Read at scrape time from the node table; nothing is kept here.
"""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.node import NodeHandle, NodeState
from router.registry import Registry

_LABELS = ("node", "role")

_GAUGES: tuple[tuple[str, str, Callable[[NodeHandle], float]], ...] = (
    ("node_up", "1 while the node is live.", lambda node: float(node.state is NodeState.LIVE)),
    ("node_requests_running", "Sequences that run or receive KV.", lambda node: node.load.num_requests_running),
    ("node_requests_waiting", "Sequences that wait for a step.", lambda node: node.load.num_requests_waiting),
    ("node_queued_tokens", "Prompt tokens not computed yet.", lambda node: node.load.num_queued_tokens),
    ("node_leases", "Requests whose published blocks are kept.", lambda node: node.load.num_leases),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda node: node.load.kv_cache_usage),
)


class NodeMetrics(Collector):
    """Register it with the router's CollectorRegistry."""

    def __init__(self, nodes: Registry) -> None:
        self._nodes = nodes

    def collect(self) -> Iterable[Metric]:
        nodes = [(_labels(node), node) for node in self._nodes.nodes]
        for name, text, value in _GAUGES:
            family = GaugeMetricFamily(f"kvrelay:{name}", text, labels=_LABELS)
            for labels, node in nodes:
                family.add_metric(labels, value(node))
            yield family
        preemptions = CounterMetricFamily("kvrelay:num_preemptions", "Sequences preempted.", labels=_LABELS)
        for labels, node in nodes:
            preemptions.add_metric(labels, node.load.num_preemptions)
        yield preemptions


def _labels(node: NodeHandle) -> tuple[str, str]:
    node_id = node.address if node.description is None else node.description.source.node_id
    return node_id, node.role.value
