"""In what a router and its nodes have to agree: everything that two of these processes compare is compared here.

Values only: who has to fit whom is decided in `fit` and `election`. A router compares; nodes know of each other only
what a request carries, and verify every block that they fetch.
"""

from kvrelay.core.errors import KVError
from kvrelay.core.kv.connectors import is_between_devices, needs_same_host
from kvrelay.core.kv.endpoints import parse_endpoints
from kvrelay.core.node_report import PROTOCOL, NodeDescription, NodeRole


def misfit(found: NodeDescription, role: NodeRole, vocabulary: bytes) -> str | None:
    """Returns why a node can be none of a router's, whatever the other nodes are; None if it can. The router lists the
    node under `role`; `vocabulary` is the digest of its own vocabulary, nothing if it is not known."""
    if found.protocol != PROTOCOL:
        return f"protocol is {found.protocol}, but this router's is {PROTOCOL}: run versions of kvrelay that share one"
    if found.role is not role:
        name = "unknown" if found.role is None else found.role.value
        return f"role is {name}, but it is listed among the {role.value} nodes"
    if vocabulary and found.vocabulary not in (b"", vocabulary):
        return "its tokenizer gives ids to other tokens than this router's: start both with the same model"
    return None


def difference(found: NodeDescription, expected: NodeDescription) -> str | None:
    """Returns the first difference because of which two nodes cannot exchange KV or would end an output elsewhere, with
    both values; None if there is none."""
    ours, theirs = found.kv_namespace, expected.kv_namespace
    arrangement, scales = _layout_parts(ours.layout_id)
    their_arrangement, their_scales = _layout_parts(theirs.layout_id)
    fields: tuple[tuple[str, object, object], ...] = (
        ("KV dtype", ours.kv_dtype, theirs.kv_dtype),  # before the fingerprint, which depends on it and explains less
        (
            "model fingerprint (of the weights, config.json, --dtype and --quantization)",
            ours.model_fingerprint.hex()[:16],
            theirs.model_fingerprint.hex()[:16],
        ),
        ("block size", ours.block_size, theirs.block_size),
        ("KV layout", arrangement, their_arrangement),
        ("digest of the FP8 scales (of the checkpoint or --calculate-kv-scales)", scales, their_scales),
        ("vocabulary size", found.vocab_size, expected.vocab_size),
        (
            "list of end tokens (of generation_config.json or config.json, and of tokenizer_config.json)",
            list(found.eos_token_ids),
            list(expected.eos_token_ids),
        ),
    )
    for name, one, other in fields:
        if one != other:
            return f"{name} is {one}, not {other}"
    return _connector_difference(found, expected)


def _layout_parts(layout_id: str) -> tuple[str, str]:
    """Returns how a block's bytes are arranged, and the digest of their scales if there is one (`KVLayout.layout_id`
    joins them)."""
    parts = layout_id.split("/")
    return "/".join(parts[:3]), "/".join(parts[3:])


def _connector_difference(found: NodeDescription, expected: NodeDescription) -> str | None:
    names, expected_names = set(found.connector.split(",")), set(expected.connector.split(","))
    shared = names & expected_names
    if not shared:
        one_stages = ": one's KV is staged, set --kv-device-transfer staged for both"
        remedy = one_stages if any(map(is_between_devices, names | expected_names)) else ""
        return f"connector is {found.connector}, not {expected.connector}{remedy}"
    ours, theirs = _host(found), _host(expected)
    if ours == theirs or not all(map(needs_same_host, shared)):
        return None
    return (
        f"host is {ours}, not {theirs}, and all they share is {','.join(sorted(shared))}, which reaches no other host: "
        "set --connector shared_memory,ucx or redis for both"
    )


def _host(node: NodeDescription) -> str:
    try:
        return parse_endpoints(node.source.endpoint).host
    except KVError:
        return "unknown"
