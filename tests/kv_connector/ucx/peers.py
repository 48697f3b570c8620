"""Nodes with a UCX connector, and the holders to which one has connections."""

from kv_connector.settings import UcxSettings
from kv_connector.ucx.connector import UcxConnector
from kv_connector.ucx.reader import Peer
from kvrelay.core.kv.layout import KVLayout
from tests.kv_connector.backends import CLUSTER_SECRET, EPOCH, LAYOUT, Node
from tests.kv_connector.ucx.owner import NUM_BLOCKS


def ucx_node(
    node_id: str,
    *,
    num_blocks: int = NUM_BLOCKS,
    layout: KVLayout = LAYOUT,
    secret: str = CLUSTER_SECRET,
    net_devices: str = "",
) -> Node:
    return Node(UcxConnector(UcxSettings(secret, net_devices=net_devices)), node_id, num_blocks, layout, EPOCH)


def peers_of(reader: Node) -> list[Peer]:
    assert isinstance(reader.connector, UcxConnector)
    return list(reader.connector._require().peers.values())
