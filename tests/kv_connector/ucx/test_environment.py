"""The variables that tell UCX how to log are set before it is loaded and only then, and keep a user's values."""

import os
import subprocess
import sys

import pytest

from kv_connector.ucx.environment import prepare_ucx_environment

VARIABLES = ("UCX_WARN_UNUSED_ENV_VARS", "UCX_LOG_FILE", "UCX_LOG_LEVEL", "UCXX_LOG_LEVEL", "UCXPY_LOG_LEVEL")


def test_what_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UCX_LOG_LEVEL", "DEBUG")
    prepare_ucx_environment()
    assert [os.environ[name] for name in VARIABLES] == ["n", "stderr", "DEBUG", "FATAL", "CRITICAL"]


@pytest.mark.parametrize("make", ["create_connector", "create_direct"])
def test_asking_for_the_connector_prepares_what_importing_the_registry_does_not(make: str) -> None:
    code = f"""
import os, sys
from kv_connector.registry import {make}
from kv_connector.settings import ConnectorSettings, UcxSettings

class WhenLoaded:
    def find_spec(self, name, path=None, target=None):
        if name == "ucxx":
            print("when loaded", *(os.environ[name] for name in {VARIABLES}))

sys.meta_path.insert(0, WhenLoaded())
print("when imported", [name for name in os.environ if name in {VARIABLES}])
{make}("ucx", ConnectorSettings(ucx=UcxSettings("a secret that is long enough")))
"""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    output = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, stdout=subprocess.PIPE, text=True
    ).stdout
    assert output.splitlines()[:2] == ["when imported []", "when loaded n stderr FATAL FATAL CRITICAL"]
