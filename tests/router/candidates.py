"""Facts for policies: a request, and nodes that hold, will hold and have to do what a test says."""

from router.policies.facts import Candidates, DecodeCandidate, PrefillCandidate, RequestFacts

BLOCK_SIZE = 16


def facts(num_prompt_tokens: int = 1000, *, number: int = 0) -> RequestFacts:
    return RequestFacts(number, num_prompt_tokens, 1, BLOCK_SIZE)


def prefill(node_id: str, *, held: int = 0, coming: int = 0, queued: int = 0) -> PrefillCandidate:
    return PrefillCandidate(node_id, held, max(held, coming), queued)


def decode(
    node_id: str,
    *,
    held: int = 0,
    coming: int = 0,
    sequences: int = 0,
    free: int = 10_000,
    queued: int = 0,
    decoding: int = 0,
    places: int = 256,
) -> DecodeCandidate:
    return DecodeCandidate(node_id, held, max(held, coming), queued, sequences, free, decoding, places)


def candidates(*nodes: PrefillCandidate | DecodeCandidate) -> Candidates:
    return Candidates(
        tuple(node for node in nodes if isinstance(node, PrefillCandidate)),
        tuple(node for node in nodes if isinstance(node, DecodeCandidate)),
    )
