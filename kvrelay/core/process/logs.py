"""Logging of a process: one line per record on standard error, in UTC, so that the lines of many processes can be
merged.

A line is `2025-01-31T12:00:00.123Z INFO    decode-0 kvrelay.engine.scheduler: message`. Standard output stays free for
what a program prints.
"""

import logging
import time
from typing import Literal

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


def configure_logging(process: str, level: str) -> None:
    """Sets up logging, called once by a process's `main`. `process` names the process in every line; `level` is a
    `LogLevel`. Libraries that log every call only log warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(_LineFormatter(process))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    # uvicorn notes its start and end under the name uvicorn.error, which a search for errors would find in every log.
    for chatty in ("asyncio", "grpc", "httpx", "httpcore", "transformers", "urllib3", "uvicorn"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
