"""Why gRPC does not reach a node, in a few words: an answer with status 503 has those of all decode nodes."""

import grpc

from kvrelay.core.rpc.errors import stranger


def complaint(failure: grpc.aio.AioRpcError, address: str, *, timeout: float) -> str:
    """Returns what a failed call tells of the node that is listed by this address. `timeout`: the seconds that it had
    to describe itself; no other of the registry's calls has a deadline."""
    code, details = failure.code(), failure.details() or ""
    if found := stranger(code, details, "kvrelay node"):
        return f"what answers there {found}; list nodes by their gRPC addresses"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"it did not describe itself within {timeout:g} seconds"
    if details.startswith(("failed to connect to all addresses; ", "errors resolving ")):
        # Of a name, the address that was tried is kept.
        details = details.rpartition("last error: UNKNOWN: ")[2].rpartition(f"{address}: ")[2].rstrip("]")
        details = details.replace("Failed to connect to remote host: ", "")
    return details or code.name
