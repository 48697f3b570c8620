"""Which of a server's models a benchmark asks for. Both protocols choose in the same way."""

from collections.abc import Sequence

from kvrelay.core.errors import UnknownModelError


def choose_model(wanted: str, served: Sequence[str], *, where: str) -> str:
    """Returns the wanted model, or the only one of the server if `wanted` is empty. `where` names the server in errors.
    A server that lists no models may have the wanted one all the same.

    Raises UnknownModelError when the wanted model is not listed, or when none is wanted and not exactly one is listed.
    """
    if not served and wanted:
        return wanted
    if not served:
        raise UnknownModelError(f"{where} names no model: give one with --model")
    if not wanted and len(served) > 1:
        raise UnknownModelError(f"{where} has several models: choose one with --model: {', '.join(served)}")
    if wanted and wanted not in served:
        raise UnknownModelError(f"--model: no model {wanted!r} there; {where} has {', '.join(served)}")
    return wanted or served[0]
