"""What a proof over UCX is a proof of."""

from kv_connector.geometry import Geometry
from kv_connector.ucx.auth import Session

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
