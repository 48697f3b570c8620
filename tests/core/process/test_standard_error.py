"""Lines on a standard error that nobody reads, or nobody reads in time."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pytest

from kvrelay.core.process import standard_error
from kvrelay.core.process.standard_error import StandardError


@contextmanager
def slow_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[BinaryIO]:
    """Makes standard error a pipe while the context is open, and yields its other end, where reading does not wait."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with os.fdopen(reader, "rb") as read, os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        yield read


def test_lines_that_nobody_takes_are_lost_and_later_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_reader(monkeypatch) as pipe:
        lines = StandardError()
        for number in range(1000):  # many times as much as a pipe holds
            lines.write_from("decode-0", f"{number} {'x' * 1700}")
        taken = pipe.read()
        assert taken.startswith(b"[decode-0] 0 xxx") and 4096 < len(taken) <= 1 << 16
        lines.write_from("decode-0", "y" * 5000)
        lines.write("z")
        *_, missing, first, second = (taken + pipe.read()).decode().splitlines()
        assert missing.startswith(f"(lines missing here: {1000 - taken.count(10)}; ")
        assert (first, second) == (f"[decode-0] {'y' * 5000}", "z")


@pytest.mark.timeout(20)
def test_a_reader_that_is_slow_again_soon_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard_error, "_REST_SECONDS", 3600.0)
    with slow_reader(monkeypatch) as pipe:
        lines = StandardError()
        for patience in (1, 10**9):  # a second wait would not end
            monkeypatch.setattr(standard_error, "_PATIENCE_MS", patience)
            for _ in range(1000):  # many times as much as a pipe holds
                lines.write("x" * 1700)
            pipe.read()
            lines.write("taken")
        assert pipe.read().endswith(b"taken\n")


def test_nobody_misses_them_when_the_reader_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        StandardError().write_from("decode-0", "a line")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # closing writes what is buffered once more


def test_what_is_no_file_gets_all_lines(capsys: pytest.CaptureFixture[str]) -> None:
    StandardError().write_from("router", "z" * 5000)
    assert capsys.readouterr().err == f"[router] {'z' * 5000}\n"
