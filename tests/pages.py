"""What tests read of a page: its sections, the names in them, its tables."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """Returns what follows a heading, given with its number signs, up to the next one that is not below it."""
    rank = heading.index(" ")
    [found] = re.findall(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{rank}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    assert isinstance(found, str)
    return found


def rows(text: str) -> list[list[str]]:
    """Returns the cells of the first table of a text, without its head."""
    table = re.search(r"^\|.*?\n(?!\|)", text + "\n", re.MULTILINE | re.DOTALL)
    assert table is not None
    lines = table[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def names(text: str) -> list[str]:
    """Returns what stands between backquotes and is a name."""
    return re.findall(r"`([\w.]+)`", text)
