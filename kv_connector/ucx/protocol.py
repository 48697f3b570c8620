"""The messages between two UCX connectors: little-endian structs, whose sizes are known or bounded in advance.

    reader                                             holder
      | -- Hello: magic, version, nonce ----------------> |
      | <------------- Challenge: magic, version, nonce - |
      | -- Proof: layout, payload bytes, HMAC ----------> |   wrong HMAC: dropped
      | <----- Welcome: layout, payload bytes, epoch, HMAC |  other layout: dropped after this
      |                                                   |
      | -- Ask: number of names, names -----------------> |   again and again, one at a time
      | <== one tagged message per name: the payload ==== |   one byte where there is none
      | <-- Reply: one entry per name: status, header --- |   after the last payload has left

The first four are sent on the endpoint's stream and have fixed sizes. The others are tagged (`Session.derive_tag` plus
position, known only to the two ends), so that payloads go directly where the reader has posted its receives.
Invariant: no length that came from the other side is trusted.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

from kv_connector.geometry import Geometry
from kv_connector.header import HEADER_BYTES
from kvrelay.core.errors import KVError
from kvrelay.core.kv.block_hash import HASH_BYTES, BlockHash

UCX_PROTOCOL_VERSION = 1
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_ASK_BYTES = 4 << 20  # payload of one Ask, unless a single block is larger
MAX_ASK_BLOCKS = 128
POSITION_BITS = 16  # the low bits of a tag
REPLY_POSITION = (1 << POSITION_BITS) - 1
ASK_POSITION = REPLY_POSITION - 1  # greater than any block's
ABSENT = b"\0"  # sent instead of the payload of a block that is not there

_MAGIC = b"KVRU"
_OPENING = struct.Struct(f"<4sI{NONCE_BYTES}s")  # Hello and Challenge
_PROOF = struct.Struct(f"<16sQ{MAC_BYTES}s")
_WELCOME = struct.Struct(f"<16sQQ{MAC_BYTES}s")
_COUNT = struct.Struct("<I")
_GEOMETRY = struct.Struct("<16sQ")
_ENTRY = struct.Struct(f"<I{HEADER_BYTES}s")

OPENING_BYTES = _OPENING.size
PROOF_BYTES = _PROOF.size
WELCOME_BYTES = _WELCOME.size
ENTRY_BYTES = _ENTRY.size


class ProtocolError(KVError):
    """The peer does not speak this protocol or this version of it, or does not know the cluster's secret. `reason` is
    the message without what the peer has chosen."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason + details)
        self.reason = reason


class Status(IntEnum):
    """The holder's answer about one name, after its payload was sent."""

    SENT = 1
    MISSING = 2
    RETRACTED = 3  # while it was being sent, so what arrived may be anything


@dataclass(frozen=True, slots=True)
class Entry:
    """One name's line in a Reply. `header` is meaningful with SENT only."""

    status: Status
    header: bytes = bytes(HEADER_BYTES)


def blocks_per_ask(geometry: Geometry) -> int:
    """Returns how many blocks one Ask may name."""
    return min(MAX_ASK_BLOCKS, max(1, MAX_ASK_BYTES // geometry.block_bytes))


def ask_bytes(geometry: Geometry) -> int:
    """Returns the size of the largest Ask."""
    return _COUNT.size + blocks_per_ask(geometry) * HASH_BYTES


def encode_geometry(geometry: Geometry) -> bytes:
    return _GEOMETRY.pack(geometry.layout_digest, geometry.block_bytes)


def encode_opening(nonce: bytes) -> bytes:
    return _OPENING.pack(_MAGIC, UCX_PROTOCOL_VERSION, nonce)


def decode_opening(data: bytes) -> bytes:
    """Returns the nonce."""
    magic, version, nonce = _OPENING.unpack(data)
    if magic != _MAGIC:
        raise ProtocolError("not a kvrelay UCX peer")
    if version != UCX_PROTOCOL_VERSION:
        raise ProtocolError("another version of the UCX protocol", f": {version}, not {UCX_PROTOCOL_VERSION}")
    return bytes(nonce)


def encode_proof(geometry: Geometry, mac: bytes) -> bytes:
    return _PROOF.pack(geometry.layout_digest, geometry.block_bytes, mac)


def decode_proof(data: bytes) -> tuple[Geometry, bytes]:
    layout, block_bytes, mac = _PROOF.unpack(data)
    return Geometry(layout, block_bytes), mac


def encode_welcome(geometry: Geometry, epoch: int, mac: bytes) -> bytes:
    return _WELCOME.pack(geometry.layout_digest, geometry.block_bytes, epoch, mac)


def decode_welcome(data: bytes) -> tuple[Geometry, int, bytes]:
    """Returns geometry, epoch and HMAC."""
    layout, block_bytes, epoch, mac = _WELCOME.unpack(data)
    return Geometry(layout, block_bytes), epoch, mac


def encode_ask(names: list[BlockHash]) -> bytes:
    return _COUNT.pack(len(names)) + b"".join(names)


def decode_ask(data: bytes, limit: int) -> list[BlockHash]:
    """Returns the names at the beginning of `data`, which has room for `limit` of them."""
    (count,) = _COUNT.unpack_from(data)
    if not 1 <= count <= limit:
        raise ProtocolError("too many blocks asked for at once", f": {count}, at most {limit} may be")
    end = _COUNT.size + count * HASH_BYTES
    return [BlockHash(data[start : start + HASH_BYTES]) for start in range(_COUNT.size, end, HASH_BYTES)]


def encode_reply(entries: list[Entry]) -> bytes:
    return b"".join(_ENTRY.pack(entry.status, entry.header) for entry in entries)


def decode_reply(data: bytes) -> list[Entry]:
    try:
        return [Entry(Status(status), header) for status, header in _ENTRY.iter_unpack(data)]
    except ValueError as error:
        raise ProtocolError(f"a reply with an unknown status: {error}") from None
