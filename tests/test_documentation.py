"""What the pages link to is there, and so are the paths that they name and the sections that comments name. Their
commands and configuration files are such as kvrelay takes, and scripts have the flags that they name."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvrelay.bench.command import SETTINGS
from kvrelay.cli.client import ChatSettings, CompleteSettings, StatusSettings
from kvrelay.cli.serve import ServeSettings
from kvrelay.core.config import ProcessSettings, load_settings
from kvrelay.node.settings import NodeSettings
from router.settings import RouterSettings

ROOT = Path(__file__).parent.parent
PAGES = [*(ROOT / name for name in ("README.md", "AGENTS.md", "demo/README.md")), *sorted((ROOT / "docs").glob("*.md"))]
# Paths begin with one of these; that of our kernels is the name under which they are imported.
FOLDERS = {
    **{name: ROOT / name for name in ("bench", "demo", "docs", "kernels", "proto", "tests")},
    **{name: ROOT / name for name in ("kvrelay", "kv_connector", "router", "prefill_node", "decode_node")},
    "paged_kernels": ROOT / "kernels" / "paged_kernels",
}
COMMANDS: Mapping[str, type[ProcessSettings]] = {
    "serve": ServeSettings,
    "prefill": NodeSettings,
    "decode": NodeSettings,
    "router": RouterSettings,
    "complete": CompleteSettings,
    "chat": ChatSettings,
    "status": StatusSettings,
    **{f"bench {name}": settings for name, settings in SETTINGS.items()},
}
_COMMAND = re.compile(rf"^(?:\w+=\S+ +)*kvrelay +({'|'.join(COMMANDS)})(?: +(.*))?$", re.MULTILINE)
_FILE = re.compile(r"^`(\w+\.yaml)`.*?^```yaml\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SCRIPT = re.compile(r"python -m ((?:bench|tests)\.[a-z_]+)([^`\n]*)")
_FLAG = re.compile(r"(?<![\w-])--([a-z][\w-]*)")
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_taken(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    for name, content in _FILE.findall(text):
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command, arguments in _COMMAND.findall(text):
        load_settings(COMMANDS[command], shlex.split(arguments, comments=True), prog=f"kvrelay {command}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_have_the_flags(page: Path) -> None:
    for module, arguments in _SCRIPT.findall(page.read_text(encoding="utf-8")):
        path = ROOT / module.replace(".", "/")
        source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
        for flag in _FLAG.findall(arguments):
            is_there = f'"--{flag}"' in source or f"\n    {flag.replace('-', '_')}: " in source
            assert is_there, f"{page.name} calls {module} with --{flag}"
