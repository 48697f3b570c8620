"""The block hash against its specification: test vectors for any language, recomputed with hashlib and struct alone."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvrelay.core.kv.block_hash import SCHEME_VERSION, BlockHash, KVNamespace, block_hashes, next_block_hash

DOCUMENT: dict[str, Any] = json.loads((Path(__file__).parents[3] / "proto" / "block_hash_vectors.json").read_text())
VECTORS: list[dict[str, Any]] = DOCUMENT["vectors"]


def specified_root(vector: dict[str, Any]) -> bytes:
    namespace = vector["namespace"]
    fields = [
        struct.pack("<I", 1),
        bytes.fromhex(namespace["model_fingerprint"]),
        namespace["kv_dtype"].encode(),
        namespace["layout_id"].encode(),
        struct.pack("<I", namespace["block_size"]),
        bytes.fromhex(vector["adapter_digest"]),
        bytes.fromhex(vector["cache_salt"]),
    ]
    return hashlib.sha256(b"".join(struct.pack("<I", len(field)) + field for field in fields)).digest()


def specified_hashes(root: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
    names = []
    for start in range(0, len(token_ids), block_size):
        tokens = token_ids[start : start + block_size]
        root = hashlib.sha256(root + b"".join(struct.pack("<I", token) for token in tokens)).digest()
        names.append(root)
    return names


def test_the_vectors_cover_the_scheme() -> None:
    assert DOCUMENT["scheme_version"] == SCHEME_VERSION
    assert len({vector["root"] for vector in VECTORS}) == 5
    assert any(2**32 - 1 in vector["token_ids"] for vector in VECTORS)


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_our_hashes_and_those_of_the_specification_are_those_of_the_vector(vector: dict[str, Any]) -> None:
    namespace = vector["namespace"]
    size, token_ids = namespace["block_size"], vector["token_ids"]
    expected = [bytes.fromhex(name) for name in vector["block_hashes"]]
    assert specified_root(vector).hex() == vector["root"]
    assert specified_hashes(specified_root(vector), token_ids, size) == expected

    fingerprint = bytes.fromhex(namespace["model_fingerprint"])
    root = KVNamespace(fingerprint, namespace["kv_dtype"], namespace["layout_id"], size).root(
        cache_salt=bytes.fromhex(vector["cache_salt"]), adapter_digest=bytes.fromhex(vector["adapter_digest"])
    )
    assert root.hex() == vector["root"]
    assert list(block_hashes(root, token_ids, size, include_partial=True)) == expected
    assert list(block_hashes(root, token_ids, size)) == expected[: vector["num_full_blocks"]]
    parent: BlockHash = root
    for index, name in enumerate(expected):
        parent = next_block_hash(parent, token_ids[index * size : (index + 1) * size])
        assert parent == name
