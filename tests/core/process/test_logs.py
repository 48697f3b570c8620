"""One line per record, in UTC, with level, process and logger."""

import logging
import re
from collections.abc import Iterator

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from kvrelay.core.process.logs import configure_logging

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Restores the root logger afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    of_grpc = logging.getLogger("grpc._cython.cygrpc")
    filters = list(of_grpc.filters)
    yield
    root.handlers, root.level = handlers, level
    of_grpc.filters = filters


def test_a_record_is_one_line_with_time_level_process_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("decode-0 100%", "info")
    logging.getLogger("kvrelay.engine").info("%s took %d blocks\nand more", "request-1", 3)
    line = TIME + r" INFO    decode-0 100% kvrelay\.engine: request-1 took 3 blocks\\nand more\n"
    assert re.fullmatch(line, capsys.readouterr().err)


def test_no_character_of_a_message_begins_a_line_or_reaches_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", "debug")
    logging.getLogger("kvrelay").debug("field %s", "a\r2026 ERROR\x1b[31m\x0b\x00\x85\x9b\u2028\u2029\tb \u00e9")
    written = capsys.readouterr().err
    assert written.endswith(": field a\\r2026 ERROR\\x1b[31m\\x0b\\x00\\x85\\x9b\\u2028\\u2029\\tb \u00e9\n")
    assert len(written.splitlines()) == 1


def test_chatty_libraries_log_only_warnings_at_any_level(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", "debug")
    logging.getLogger("kvrelay").debug("shown")
    logging.getLogger("httpx").info("hidden")
    logging.getLogger("uvicorn.error").info("hidden: Started server process")
    logging.getLogger("httpx").warning("shown as well")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rsplit(": ", 1)[1] for line in lines] == ["shown", "shown as well"]


def test_an_answer_to_a_call_that_has_just_ended_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", "debug")
    logger = logging.getLogger("grpc._cython.cygrpc")
    for error in (cygrpc.ExecuteBatchError("too late"), ValueError("a fault")):
        try:
            raise error
        except Exception:
            logger.exception("raised by a servicer method")
    logger.error("another")
    written = capsys.readouterr().err
    assert "too late" not in written
    assert "ValueError: a fault" in written and written.endswith(": another\n")


def test_a_process_that_configures_twice_logs_each_record_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("router", "info")
    configure_logging("router", "error")
    logging.getLogger("kvrelay").error("once")
    for name in ("kvrelay", "httpx"):
        logging.getLogger(name).warning("not at this level")
    assert capsys.readouterr().err.count("\n") == 1
