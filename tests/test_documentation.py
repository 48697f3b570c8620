"""What the pages link to is there, and so are the paths that they name and the sections that comments name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*(ROOT / name for name in ("README.md", "AGENTS.md", "demo/README.md")), *sorted((ROOT / "docs").glob("*.md"))]
# Paths begin with one of these; that of our kernels is the name under which they are imported.
FOLDERS = {
    **{name: ROOT / name for name in ("bench", "demo", "docs", "kernels", "proto", "tests")},
    **{name: ROOT / name for name in ("kvrelay", "kv_connector", "router", "prefill_node", "decode_node")},
    "paged_kernels": ROOT / "kernels" / "paged_kernels",
}
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#:]*)#?([^):]*)\)")
_PATH = re.compile(r"`(\w+)/([\w./*-]*)`")
_SECTION = re.compile(r"(?<![\w/])docs/(\w+\.md)(?:, ([^)\n]+)\))?")


def headings(page: Path) -> list[str]:
    return _HEADING.findall(page.read_text(encoding="utf-8"))


def anchor_of(heading: str) -> str:
    """Returns what GitHub makes of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def sources() -> Iterator[Path]:
    for folder in FOLDERS.values():
        yield from (path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".inl"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_sections(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in map(anchor_of, headings(found)), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    for folder, rest in _PATH.findall(page.read_text(encoding="utf-8")):
        if folder in FOLDERS:
            assert any(FOLDERS[folder].glob(rest or "*")), f"{page.name} names {folder}/{rest}"


def test_comments_name_sections_that_exist() -> None:
    for path in sources():
        for page, section in _SECTION.findall(path.read_text(encoding="utf-8")):
            assert (ROOT / "docs" / page).is_file(), f"{path} names {page}"
            assert not section or section in headings(ROOT / "docs" / page), f"{path} names {page}, {section}"
