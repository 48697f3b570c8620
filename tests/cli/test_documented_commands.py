"""What the pages say to type and to write into files is what kvrelay takes: commands, files, flags, variables."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.peers.__main__ import PeersSettings
from kvrelay.bench.command import SETTINGS as BENCH_SETTINGS
from kvrelay.cli.client import ChatSettings, CompleteSettings, StatusSettings
from kvrelay.cli.serve import ServeSettings
from kvrelay.core.config.fields import flag_of, variable_of
from kvrelay.core.config.settings import ProcessSettings, load_settings
from kvrelay.node.settings import SETTINGS_OF_COMMAND, NodeSettings
from router.settings import RouterSettings
from tests.pages import DOCS, ROOT, names, rows, section

SETTINGS: Mapping[str, type[ProcessSettings]] = {
    "serve": ServeSettings,
    **SETTINGS_OF_COMMAND,
    "router": RouterSettings,
    "complete": CompleteSettings,
    "chat": ChatSettings,
    "status": StatusSettings,
    **{f"bench {command}": settings for command, settings in BENCH_SETTINGS.items()},
}
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
BLOCKS = [block for text in PAGES.values() for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)]
COMMANDS = re.findall(r"^(?:KVRELAY_\w+=\S+ )?kvrelay (.*)$", "".join(BLOCKS), re.MULTILINE)
PROGRAMS = [*ROOT.glob("bench/**/*.py"), *ROOT.glob("tests/*/__main__.py"), *ROOT.glob("demo/*.py")]
FLAGS_OF_OTHERS = {
    *("--constraint", "--editable", "--extra-index-url"),  # pip's
    *("--go_out", "--go_opt", "--go-grpc_out", "--go-grpc_opt"),  # protoc's
    *("--strict", "--help"),
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder, in which we are, with the files of docs/deployment.md."""
    found = re.findall(r"^`(\w+\.yaml)`, on .*?^```yaml\n(.*?)^```", PAGES["deployment.md"], re.MULTILINE | re.DOTALL)
    assert [name for name, _ in found] == ["prefill.yaml", "decode.yaml", "router.yaml"]
    for name, text in found:
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(line: str, files: Path) -> None:
    argv = shlex.split(line, comments=True)
    words = 2 if argv[0] == "bench" else 1
    command = " ".join(argv[:words])
    load_settings(SETTINGS[command], argv[words:], prog=f"kvrelay {command}")


@pytest.mark.parametrize("command", SETTINGS)
def test_examples_of_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(SETTINGS[command], ["--help"], prog=f"kvrelay {command}")
    for example in re.findall(r"^Example: kvrelay (.*)$", capsys.readouterr().out, re.MULTILINE):
        assert example.startswith(f"{command} ")
        argv = shlex.split(example.removeprefix(command))
        load_settings(SETTINGS[command], argv, prog=f"kvrelay {command}")


def test_the_files_are_of_one_cluster(files: Path) -> None:
    prefill, decode = (
        load_settings(NodeSettings, ["--config", f"{role}.yaml"], prog=role) for role in ("prefill", "decode")
    )
    router = load_settings(RouterSettings, ["--config", "router.yaml"], prog="router")
    assert router.prefill_nodes == (f"{prefill.host}:{prefill.port}",)
    assert router.decode_nodes[0] == f"{decode.host}:{decode.port}"
    assert prefill.model == decode.model == router.model


@pytest.mark.parametrize("name", PAGES)
def test_flags_and_variables(name: str) -> None:
    fields = {field: found for settings in SETTINGS.values() for field, found in settings.model_fields.items()}
    switches = {flag_of(f"no_{field}") for field, found in fields.items() if found.annotation is bool}
    flags = FLAGS_OF_OTHERS | switches | set(map(flag_of, [*fields, *PeersSettings.model_fields]))
    for program in PROGRAMS:
        flags.update(re.findall(r'"(--[a-z][\w-]*)"', program.read_text(encoding="utf-8")))
    assert set(re.findall(r"(?<![\w-])--[a-z](?:[\w-]*\w)?(?![\w-])", PAGES[name])) <= flags
    assert set(re.findall(r"\bKVRELAY_\w*[A-Z]\b", PAGES[name])) <= set(map(variable_of, fields))


@pytest.mark.parametrize("name", PAGES)
def test_flags_of_each_program(name: str) -> None:
    for module, arguments in re.findall(r"python -m ((?:bench|tests)\.[a-z_]+)([^`\n]*)", PAGES[name]):
        path = ROOT / module.replace(".", "/")
        source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
        if "add_threads(" in source:  # which adds the flag, in `bench/arguments.py`
            source += '"--threads"'
        for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", arguments):
            is_setting = f"\n    {flag.replace('-', '_')}: " in source
            assert is_setting or f'"--{flag}"' in source, f"{name} calls {module} with --{flag}"


@pytest.mark.parametrize("heading", ["## When something fails", "## Sizing"])
def test_settings_and_defaults(heading: str) -> None:
    of: dict[str, type[ProcessSettings]] = {"nodes": NodeSettings, "router": RouterSettings}
    _, head, table = section(PAGES["deployment.md"], heading).partition("| setting | of | default | choose it by |")
    for setting, whose, default, _ in rows(head + table):
        field = of[whose.split()[0]].model_fields[re.findall(r"\w+", setting)[0]]
        if number := re.fullmatch(r"([\d,]+)( s)?", default):
            assert field.default == int(number[1].replace(",", "")), setting


def test_what_bounds_a_failure_is_a_setting() -> None:
    bounds = [bound for *_, bound in rows(section(PAGES["deployment.md"], "## When something fails"))]
    settings = [name for bound in bounds for name in names(bound)]
    assert "node_silence" in settings
    assert set(settings) <= NodeSettings.model_fields.keys() | RouterSettings.model_fields.keys()
