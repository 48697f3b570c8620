"""A missing extra is reported in one readable line."""

import re
import tomllib
from pathlib import Path

import pytest

from kvrelay.core.process.extras import ENGINE_MODULES, require_extra


def test_what_is_installed_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    require_extra("engine", ("json",), purpose="a test")
    assert capsys.readouterr() == ("", "")


def test_what_is_missing_comes_with_the_command_that_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        require_extra("engine", ("json", "no_such_module"), purpose="a decode node")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "a decode node needs no_such_module: pip install 'kvrelay[engine]'\n"


def test_the_modules_of_the_engine_are_those_that_its_extra_installs() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    requirements = project["project"]["optional-dependencies"]["engine"]
    assert tuple(re.split(r"[^a-z]", requirement)[0] for requirement in requirements) == ENGINE_MODULES
