"""A missing extra is reported in one readable line."""

import pytest

from kvrelay.core.extras import require_extra


def test_what_is_installed_is_not_mentioned() -> None:
    require_extra("engine", ("json",), purpose="a test")


def test_what_is_missing_comes_with_the_command_that_helps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        require_extra("engine", ("json", "no_such_module"), purpose="a decode node")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "a decode node needs no_such_module: pip install 'kvrelay[engine]'\n"
