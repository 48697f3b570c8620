"""What a node that is being made is called."""

import socket

from kvrelay.core.node_report import NodeRole
from kvrelay.node import startup
from kvrelay.node.settings import NodeSettings


def test_a_node_without_an_id_keeps_that_of_its_role_machine_host_and_port() -> None:
    """So its series in the router's metrics go on after a restart. Two nodes of a machine never have the same."""

    def id_of(role: NodeRole = NodeRole.DECODE, **given: object) -> str:
        return startup._default_id(NodeSettings.model_validate({"model": "m", **given}), role)

    machine = socket.gethostname()
    assert id_of(port=7000) == id_of(port=7000) == f"decode-{machine}-127.0.0.1:7000"
    assert id_of(host="::1", port=7000) == f"decode-{machine}-[::1]:7000"
    of_free_ports = [id_of(), id_of()]
    assert all(name.startswith(f"decode-{machine}-") for name in of_free_ports)
    others = [id_of(port=7001), id_of(host="127.0.0.2", port=7000), id_of(NodeRole.PREFILL, port=7000)]
    assert len({id_of(port=7000), *others, *of_free_ports}) == 6
