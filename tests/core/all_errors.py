"""Every class of the exception tree."""

from kvrelay.core import errors
from kvrelay.core.errors import KVRelayError

ALL_ERRORS = sorted(
    (cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, KVRelayError)),
    key=lambda cls: cls.__name__,
)
