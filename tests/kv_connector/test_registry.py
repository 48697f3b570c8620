"""The backends by name: every one can be created, and importing the registry imports none of them."""

import subprocess
import sys

import pytest

from kv_connector.registry import BACKENDS, create_connector, create_direct, direct_name, is_installed
from kv_connector.settings import ConnectorSettings, UcxSettings
from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.connectors import CONNECTORS, needs_same_host
from tests.kv_connector.backends import CLUSTER_SECRET

SETTINGS = ConnectorSettings(ucx=UcxSettings(CLUSTER_SECRET))


def test_every_connector_that_settings_accept_can_be_created() -> None:
    assert tuple(BACKENDS) == CONNECTORS
    for name, spec in BACKENDS.items():
        connector = create_connector(name, SETTINGS)
        assert connector.name == name and connector.has_store == spec.is_store
        assert is_installed(name), "the tests need them all"


def test_direct_connectors_have_the_names_of_their_specs() -> None:
    assert [direct_name(name) for name in BACKENDS] == ["cuda_ipc", "ucx", None]
    assert [create_direct(name, SETTINGS).name for name in ("cuda_ipc", "ucx")] == ["cuda_ipc", "ucx"]


def test_only_mapped_memory_needs_the_same_host() -> None:
    assert [name for name in ("shared_memory", "cuda_ipc", "ucx", "redis") if needs_same_host(name)] == [
        "shared_memory",
        "cuda_ipc",
    ]


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match="'rdma'; there are: shared_memory, ucx, redis"):
        create_connector("rdma", SETTINGS)
    with pytest.raises(ConfigurationError, match="'redis'; there are: cuda_ipc, ucx"):
        create_direct("redis", SETTINGS)


def test_a_missing_library_is_an_error_with_the_command_that_installs_it() -> None:
    # In a process of its own: here, a thread that another test left could import the library again meanwhile.
    code = (
        "import sys; sys.modules['redis'] = None;"
        "import kv_connector.registry as r, kv_connector.settings as s;"
        "r.create_connector('redis', s.ConnectorSettings())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode != 0
    assert ended.stderr.splitlines()[-1].startswith("kvrelay.core.errors.ConfigurationError")
    assert "pip install 'kvrelay[redis]'" in ended.stderr


def test_creating_one_backend_imports_no_library_of_another() -> None:
    code = (
        "import sys, kv_connector.registry as r, kv_connector.settings as s;"
        "r.create_connector('shared_memory', s.ConnectorSettings());"
        "sys.exit(any(m.partition('.')[0] in ('redis', 'ucxx', 'torch') for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
