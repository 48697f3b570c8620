"""Lines on a standard error that nobody reads, or nobody reads in time."""

import os
import sys

import pytest

from kvrelay.core.process.standard_error import StandardError


def test_lines_that_nobody_takes_are_lost_and_later_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as read, os.fdopen(writer, "w") as stderr:
        os.set_blocking(reader, False)
        monkeypatch.setattr(sys, "stderr", stderr)
        lines = StandardError()
        for number in range(1000):  # many times as much as a pipe holds
            lines.write_from("decode-0", f"{number} {'x' * 1700}")
        taken = read.read()
        assert taken.startswith(b"[decode-0] 0 xxx") and 4096 < len(taken) <= 1 << 16
        lines.write_from("decode-0", "y" * 5000)
        lines.write("z")
        *_, missing, first, second = (taken + read.read()).decode().splitlines()
        assert missing.startswith(f"(lines missing here: {1000 - taken.count(10)}; ")
        assert (first, second) == (f"[decode-0] {'y' * 5000}", "z")


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
