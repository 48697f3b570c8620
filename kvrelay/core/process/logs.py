"""Logging of a process: one line per record on standard error, in UTC, so that the lines of many processes can be
merged.

A line is `2025-01-31T12:00:00.123Z INFO    decode-0 kvrelay.engine.scheduler: message`. Standard output stays free for
what a program prints. A process does not wait for long for the reader of its log: it would stop serving.
"""

import logging
import time
from typing import Literal

from kvrelay.core.process.standard_error import StandardError

LogLevel = Literal["debug", "info", "warning", "error"]

# What ends a line or changes a terminal, as clients may send it: C0, DEL, C1, and Unicode's line and paragraph ends.
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)
_ESCAPES = {code: repr(chr(code))[1:-1] for code in _CONTROLS}


class _LineFormatter(logging.Formatter):
    """The format of a record: one line; only a traceback adds more."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process.replace('%', '%%')} %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)


class _StandardErrorHandler(logging.Handler):
    """Writes each record to standard error, or loses it."""

    def __init__(self) -> None:
        super().__init__()
        self._standard_error = StandardError()  # the handler's lock lets one thread at a time in

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._standard_error.write(self.format(record))
        except Exception:  # as the handlers of `logging` do
            self.handleError(record)


def configure_logging(process: str, level: str) -> None:
    """Sets up logging, called once by a process's `main`. `process` names the process in every line; `level` is a
    `LogLevel`. Libraries that log every call only log warnings."""
    handler = _StandardErrorHandler()
    handler.setFormatter(_LineFormatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # uvicorn notes its start and end under the name uvicorn.error, which a search for errors would find in every log.
    for chatty in ("asyncio", "grpc", "httpx", "httpcore", "transformers", "urllib3", "uvicorn"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_failure)


def _is_failure(record: logging.LogRecord) -> bool:
    """Tells of a record of gRPC's whether it is more than a call that had just ended, by its client or its deadline,
    when it was to be answered. gRPC itself knows that as a rule, but not if both come at the same moment."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"
