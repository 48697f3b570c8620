"""Authentication over UCX: both sides prove that they know the cluster's secret, which is never sent.

A proof is the HMAC-SHA256 over the role, both nonces and the facts that the role states, with the secret as the key.
Because of the roles a proof cannot be replayed to its maker, because of the nonces not in another connection. The
connection is authenticated when it is opened; it is not encrypted.
Invariant: nothing that a peer states is used before its proof was compared, in constant time.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from kv_connector.geometry import Geometry
from kv_connector.ucx.protocol import NONCE_BYTES, POSITION_BITS, ProtocolError, encode_geometry
from kvrelay.core.errors import ConfigurationError

MIN_SECRET_BYTES = 16


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def check_secret(secret: str) -> bytes:
    """Returns the secret as a key. Raises ConfigurationError when it is empty or short enough to be guessed."""
    key = secret.encode()
    if len(key) < MIN_SECRET_BYTES:
        raise ConfigurationError(
            f"connector 'ucx' needs a cluster secret of at least {MIN_SECRET_BYTES} characters, the same on every "
            "node: set KVRELAY_CLUSTER_SECRET or `cluster_secret:` in the --config file (for example to the output of "
            "`openssl rand -hex 32`)"
        )
    return key


@dataclass(frozen=True, slots=True)
class Session:
    """The secrets of one connection: the cluster's, and the two nonces drawn for it."""

    key: bytes = field(repr=False)
    reader_nonce: bytes
    holder_nonce: bytes

    def derive_tag(self) -> int:
        """Returns the UCX tag of position 0: a number that only the two ends can know, with room for the positions."""
        return int.from_bytes(self._mac(b"tag")[:8], "little") >> POSITION_BITS << POSITION_BITS

    def reader_proof(self, geometry: Geometry) -> bytes:
        return self._mac(b"reader" + encode_geometry(geometry))

    def holder_proof(self, geometry: Geometry, epoch: int) -> bytes:
        return self._mac(b"holder" + encode_geometry(geometry) + epoch.to_bytes(8, "little"))

    def check(self, expected: bytes, received: bytes) -> None:
        """Raises ProtocolError when a proof is not the expected one, that is, the peer does not know the secret."""
        if not hmac.compare_digest(expected, received):
            raise ProtocolError("the peer has another cluster secret")

    def _mac(self, statement: bytes) -> bytes:
        message = b"kvrelay-ucx-1" + self.reader_nonce + self.holder_nonce + statement
        return hmac.new(self.key, message, hashlib.sha256).digest()
