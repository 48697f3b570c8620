"""Files that a command writes after its measurement, tried before it: a wrong path must not cost the results."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvrelay.core.errors import ConfigurationError


def check_writable(flag: str, path: Path) -> None:
    """Raises ConfigurationError if the file that `flag` names cannot be written. Leaves no file that was not there."""
    existed = path.exists()
    with errors_naming(flag, path):
        path.open("ab").close()
        if not existed:
            path.resolve().unlink()  # of a link, what it names


@contextmanager
def errors_naming(flag: str, path: Path) -> Iterator[None]:
    """Turns an OSError of the context into a ConfigurationError that names the flag and the file."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{flag}: cannot write {path}: {error.strerror}") from error
