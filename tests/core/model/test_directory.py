"""A model's directory that cannot be read is named, with the reason. Other directories: tests/engine/loading."""

import os
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.model.directory import resolve_model_directory

NOBODY = 65534


@contextmanager
def allowed(path: Path, mode: int) -> Iterator[None]:
    """Gives everybody these permissions to `path`, and lets them count for us, also if we are root."""
    path.chmod(mode)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(NOBODY)
        yield
    finally:
        os.seteuid(user)
        path.chmod(0o755)


@pytest.mark.parametrize("mode", [0o000, 0o111, 0o444], ids=oct)
@pytest.mark.parametrize("closed", ["models", "models/mine"])
def test_what_may_not_be_read_is_named(tmp_path: Path, closed: str, mode: int) -> None:
    directory = tmp_path / "models" / "mine"
    directory.mkdir(parents=True)
    (directory / "config.json").touch()
    tmp_path.chmod(0o755)
    with chdir(tmp_path), allowed(tmp_path / closed, mode):  # relative: those above may be closed to others, too
        if (closed, mode) == ("models", 0o111):
            assert resolve_model_directory("models/mine") == Path("models/mine"), "nobody lists the one above"
        else:
            with pytest.raises(ModelLoadError, match=r"^cannot read models/mine(/config.json)?: Permission denied$"):
                resolve_model_directory("models/mine")


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"^cannot read a{300}: File name too long$"):
        resolve_model_directory("a" * 300)


def test_of_a_model_in_the_cache_only_the_revision_main_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, commit = tmp_path / "models--org--model", "0123456789" * 4
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "v1.0").write_text(commit)
    says = "In the cache, a name finds only the revision main: give another one as the directory of its snapshot"
    for name in ("org/model", "org/model@v1.0"):
        with pytest.raises(ModelLoadError, match=rf"^{name} is neither a directory nor .*{says}$"):
            resolve_model_directory(name)
    assert resolve_model_directory(str(snapshot)) == snapshot
    (model / "refs" / "main").write_text(commit)
    assert resolve_model_directory("org/model") == snapshot


def test_the_home_of_a_user_that_there_is_not_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"^~no-such-user/model is neither a directory nor"):
        resolve_model_directory("~no-such-user/model")
