"""What a proof over UCX is a proof of, and what tells the messages of a connection from others."""

import hmac

from kv_connector.geometry import Geometry
from kv_connector.ucx.auth import Session
from kv_connector.ucx.protocol import REPLY_POSITION

KEY, GEOMETRY = b"k" * 32, Geometry(b"l" * 16, 4096)


def test_a_proof_holds_for_one_role_one_statement_and_one_connection() -> None:
    sessions = [
        Session(KEY, b"r" * 32, b"h" * 32),
        Session(KEY, b"R" * 32, b"h" * 32),
        Session(KEY, b"r" * 32, b"H" * 32),
    ]
    others = [GEOMETRY, Geometry(b"L" * 16, 4096), Geometry(b"l" * 16, 8192)]
    proofs = [
        proof
        for session in sessions
        for geometry in others
        for proof in (session.reader_proof(geometry), *(session.holder_proof(geometry, epoch) for epoch in (1, 2)))
    ]
    assert len(set(proofs)) == len(proofs)


def test_a_proof_is_made_of_the_documented_bytes_with_the_secret_as_the_key() -> None:
    session = Session(KEY, b"r" * 32, b"h" * 32)
    nonces, geometry = b"r" * 32 + b"h" * 32, b"l" * 16 + b"\0\x10" + bytes(6)
    for role, epoch, proof in (
        (b"reader", b"", session.reader_proof(GEOMETRY)),
        (b"holder", b"\7" + bytes(7), session.holder_proof(GEOMETRY, 7)),
    ):
        assert proof == hmac.digest(KEY, b"kvrelay-ucx-1" + nonces + role + geometry + epoch, "sha256")


def test_a_session_does_not_show_the_secret() -> None:
    assert KEY.decode() not in repr(Session(KEY, b"r" * 32, b"h" * 32))


def test_a_tag_has_room_for_every_position_and_no_other_connection_or_secret_has_it() -> None:
    sessions = [
        Session(key, reader_nonce * 32, holder_nonce * 32)
        for key in (KEY, b"K" * 32)
        for reader_nonce in (b"r", b"R")
        for holder_nonce in (b"h", b"H")
    ]
    tags = {session.derive_tag() for session in sessions}
    assert len(tags) == len(sessions)
    assert all(tag & REPLY_POSITION == 0 and (tag + REPLY_POSITION).bit_length() <= 64 for tag in tags)
