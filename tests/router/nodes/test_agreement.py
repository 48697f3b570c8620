"""Which nodes can exchange blocks, by the connectors that they have and by the meaning of the bytes."""

from dataclasses import replace

import pytest

from kvrelay.core.kv.block_hash import KVNamespace
from kvrelay.core.kv.endpoints import Endpoints
from kvrelay.core.kv.layout import KVLayout
from kvrelay.core.kv.source import KVSource
from kvrelay.core.node_report import NodeDescription, NodeRole
from router.nodes.agreement import difference, misfit

HERE, THERE = "0123456789abcdef", "fedcba9876543210"


def node(connector: str, host: str = HERE) -> NodeDescription:
    """Returns the description of a node; redis alone has no endpoint."""
    addresses = {name: "address" for name in connector.split(",") if name != "redis"}
    return NodeDescription(
        role=None,
        source=KVSource(connector, 1, Endpoints(host, addresses).encode() if addresses else ""),
        kv_namespace=KVNamespace(bytes(32), "float32", "layout", 4),
        connector=connector,
        max_model_len=100,
        vocab_size=300,
        max_num_seqs=4,
    )


@pytest.mark.parametrize("host", [HERE, THERE])
def test_nodes_that_share_a_connector_can_exchange(host: str) -> None:
    assert difference(node("shared_memory,ucx"), node("ucx,redis", host)) is None
    assert difference(node("redis"), node("redis", host)) is None
    assert difference(node("redis"), node("shared_memory,redis", host)) is None
    found = difference(node("shared_memory"), node("ucx,redis", host))
    assert found == "connector is shared_memory, not ucx,redis"


def test_nodes_of_which_one_stages_its_kv_are_told_what_to_set() -> None:
    found = difference(node("cuda_ipc"), node("shared_memory"))
    assert found == (
        "connector is cuda_ipc, not shared_memory: one's KV is staged, set --kv-device-transfer staged for both"
    )


@pytest.mark.parametrize("connector", ["shared_memory", "cuda_ipc"])
def test_mapped_memory_connects_nodes_of_one_host_only(connector: str) -> None:
    assert difference(node(connector), node(connector)) is None
    assert difference(node(f"{connector},ucx"), node(f"{connector},ucx", THERE)) is None
    found = difference(node(f"{connector},ucx"), node(connector, THERE))
    assert found is not None and f"all they share is {connector}" in found and "--connector" in found


def test_other_scales_are_told_apart_from_another_arrangement() -> None:
    layout = KVLayout(num_kv_heads=2, num_layers=3, block_size=4, head_dim=8, dtype="float8_e4m3fn", scales_digest="ab")
    ours, scaled, wider = (
        replace(node("redis"), kv_namespace=KVNamespace(bytes(32), "float8_e4m3fn", found.layout_id, 4))
        for found in (layout, replace(layout, scales_digest="cd"), replace(layout, head_dim=16, scales_digest="cd"))
    )
    assert difference(ours, ours) is None
    assert difference(scaled, ours) == (
        "digest of the FP8 scales (of the checkpoint or --calculate-kv-scales) is cd, not ab"
    )
    arrangements = "hl2td/2x3x2x4x16/float8_e4m3fn, not hl2td/2x3x2x4x8/float8_e4m3fn"
    assert difference(wider, ours) == f"KV layout is {arrangements}"


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"), [(b"a", b"a", True), (b"a", b"", True), (b"", b"a", True), (b"a", b"b", False)]
)
def test_vocabularies_are_compared_if_both_are_known(ours: bytes, theirs: bytes, fits: bool) -> None:
    """A router whose model has no tokenizer.json does not know its own."""
    found = replace(node("redis"), role=NodeRole.DECODE, vocabulary=theirs)
    assert (misfit(found, NodeRole.DECODE, ours) is None) == fits
