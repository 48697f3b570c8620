"""Text of a server on a person's terminal."""

import pytest

from kvrelay.core.process.terminal import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc, é, 你", "a\tb\nc, é, 你"),
        ("\x1b]0;title\x07", "?]0;title?"),
        ("over\rwritten\x08\x7f\x9b2J", "over?written???2J"),
        ("\u202ereversed\ud83d", "?reversed?"),
    ],
)
def test_nothing_but_characters_lines_and_tabs(text: str, shown: str) -> None:
    assert printable(text) == shown
