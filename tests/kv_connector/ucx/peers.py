"""The holders to which a UCX connector has connections."""

from kv_connector.ucx.connector import UcxConnector
from kv_connector.ucx.reader import Peer
from tests.kv_connector.backends import Node


def peers_of(reader: Node) -> list[Peer]:
    assert isinstance(reader.connector, UcxConnector)
    return list(reader.connector._require().peers.values())
