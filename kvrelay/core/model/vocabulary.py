"""Which token each id means, also as one digest: a router that takes ids for other tokens than its nodes' model does
would turn every answer into nonsense.

Invariant: what does not change the token of an id (the order of a file's entries, rules for cutting texts, chat
templates) does not change the digest.
"""

import hashlib
from pathlib import Path
from typing import Any

from kvrelay.core.model.json_object import read_json_object


def vocabulary_digest(directory: Path) -> bytes:
    """Returns the SHA-256 digest of the tokens in a model's `tokenizer.json`; nothing if the directory has no such
    file, or its vocabulary is of an unknown form. Raises ModelLoadError for a file that cannot be read."""
    tokens = read_tokens(directory)
    if not tokens:
        return b""
    digest = hashlib.sha256()
    for token_id in sorted(tokens):
        digest.update(f"{token_id} {tokens[token_id]}\0".encode(errors="surrogatepass"))
    return digest.digest()


def read_tokens(directory: Path) -> dict[int, str]:
    """Returns the tokens in a model's `tokenizer.json` by id, added ones included; none if the directory has no such
    file, or its vocabulary is of an unknown form. Raises ModelLoadError for a file that cannot be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return {}
    fields = read_json_object(path)
    model, added_tokens = fields.get("model"), fields.get("added_tokens")
    tokens = _tokens(model.get("vocab") if isinstance(model, dict) else None)
    for added in added_tokens if isinstance(added_tokens, list) else ():
        if isinstance(added, dict) and isinstance(added.get("id"), int) and isinstance(added.get("content"), str):
            tokens[added["id"]] = added["content"]
    return tokens


def _tokens(vocabulary: Any) -> dict[int, str]:
    """Returns tokens by id. Most models have a mapping from token to id, Unigram ones a list of tokens with scores."""
    if isinstance(vocabulary, dict):
        return {token_id: token for token, token_id in vocabulary.items() if isinstance(token_id, int)}
    if isinstance(vocabulary, list):
        return {number: str(entry[0]) for number, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    return {}
