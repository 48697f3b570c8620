"""A cluster of real processes at fixed addresses, each node behind a proxy, that can be hurt and healed node by node.

Invariant: no process is left after the context of `chaos_cluster`, whatever happens in it.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from kvrelay.v1 import node_pb2
from tests.chaos.proxy import Proxy
from tests.chaos.streams import DEADLINE_SECONDS, Client
from tests.e2e.client import is_idle, load_when
from tests.e2e.cluster import FREE_PORTS
from tests.e2e.processes import Program, program
from tests.free_port import free_port
from tests.redis_server import RedisServer

CONNECTORS = ("shared_memory", "ucx", "redis")
EXIT_SECONDS = 60.0
LIVE_SECONDS = 60.0
_NICENESS = 10
NODE_NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a cluster. `directory` gets logs and pools; only this cluster's processes know the path `model`."""

    model: Path
    directory: Path
    connector: str = "shared_memory"
    redis: RedisServer | None = None
    num_blocks: int = 160
    lease_ttl: float = 10.0
    local_prefill_max_tokens: int = 0

    @property
    def pools(self) -> Path:
        return self.directory / "pools"

    def node_arguments(self) -> list[str]:
        arguments = ["--dtype", "float32", "--threads", "1", "--num-blocks", str(self.num_blocks)]
        arguments += ["--connector", self.connector, "--shared-memory-dir", str(self.pools)]
        if self.redis is not None:
            arguments += ["--redis-url", self.redis.url, "--redis-ttl", "30"]
        return arguments


class ChaosProcess:
    """One `kvrelay` command that can be started again and again, each time with a log of its own. It ends with us."""

    def __init__(self, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}
        self._command = (*command, "--supervised")
        self._directory = directory
        self._environment = environment
        self._life = ExitStack()
        self._running: Program | None = None
        self._num_starts = 0

    @property
    def running(self) -> Program:
        assert self._running is not None
        return self._running

    @property
    def pid(self) -> int:
        return self.running.process.pid

    async def start(self) -> None:
        """Starts the process and returns when it is ready."""
        await asyncio.to_thread(self._life.close)
        self._num_starts += 1
        log = self._directory / f"{self.name}.{self._num_starts}.log"
        entered = program(*self._command, log=log, directory=self._directory, environment=self._environment)
        self._running = self._life.enter_context(entered)
        self.ready = await asyncio.to_thread(self._running.wait_ready)
        _be_nice(self.pid)

    def send(self, number: int) -> None:
        self.running.process.send_signal(number)

    def hurry(self) -> None:
        """Cuts short what a process does that was told to stop, as its supervisor does."""
        stdin = self.running.process.stdin
        assert stdin is not None
        stdin.close()

    async def wait(self) -> int:
        """Returns the exit status. A process that does not end in time is killed."""
        try:
            return await asyncio.to_thread(self.running.process.wait, EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.running.kill()
            return -signal.SIGKILL

    async def terminate(self) -> int:
        """Sends SIGTERM and returns the exit status."""
        self.send(signal.SIGTERM)
        return await self.wait()

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await self.wait()

    def close(self) -> None:
        """Kills the process if it still runs."""
        self._life.close()


class ChaosNode(ChaosProcess):
    """A node that listens on the same port after every start; routers reach it through `proxy`."""

    def __init__(self, name: str, setup: Setup, environment: Mapping[str, str]) -> None:
        self.role = name.split("-")[0]
        self.port = free_port()
        self.proxy = Proxy(self.port)
        command = [self.role, str(setup.model), "--node-id", name, "--port", str(self.port), *setup.node_arguments()]
        super().__init__(name, command, setup.directory, environment)

    @property
    def address(self) -> str:
        """Returns the node's own address, not that of its proxy."""
        return f"127.0.0.1:{self.port}"

    async def load_when(self, condition: Callable[[node_pb2.NodeLoad], bool] = is_idle) -> node_pb2.NodeLoad:
        """Returns the load when it meets the condition, or the last one when time is up."""
        return await asyncio.to_thread(load_when, self.address, condition)


class ChaosCluster:
    """Two prefill nodes, two decode nodes and a router. `client` asks the router."""

    def __init__(self, setup: Setup, nodes: Sequence[ChaosNode], router: ChaosProcess) -> None:
        self.setup = setup
        self.nodes = {node.name: node for node in nodes}
        self.router = router
        self._http: httpx.AsyncClient | None = None
        self._channel: grpc.aio.Channel | None = None

    @property
    def client(self) -> Client:
        assert self._http is not None and self._channel is not None
        return Client(self._channel, self._http)

    def of_role(self, role: str) -> list[ChaosNode]:
        return [node for node in self.nodes.values() if node.role == role]

    async def start(self) -> None:
        await asyncio.gather(*(node.start() for node in self.nodes.values()))
        await self.start_router()

    async def start_router(self) -> None:
        await self.disconnect()
        await self.router.start()
        self._channel = grpc.aio.insecure_channel(self.router.ready["grpc_address"])
        limits = httpx.Limits(max_connections=None)
        base_url = f"http://{self.router.ready['http_address']}"
        self._http = httpx.AsyncClient(base_url=base_url, timeout=DEADLINE_SECONDS, limits=limits, trust_env=False)

    async def disconnect(self) -> None:
        """Closes the clients' connections to the router."""
        if self._http is not None and self._channel is not None:
            await self._http.aclose()
            await self._channel.close()

    async def live(self) -> set[str]:
        """Returns the names of the nodes that the router takes for live."""
        return {name for name in self.nodes if await self.metric("kvrelay:node_up", f'node="{name}"') == 1.0}

    async def metric(self, name: str, label: str = "") -> float:
        """Returns the sum of the samples whose labels contain `label`."""
        assert self._http is not None
        text = (await self._http.get("/metrics")).text
        found = re.findall(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for labels, value in found if label in labels)

    async def num_expired_leases(self) -> int:
        """Returns how many leases have expired in all lives of the nodes, as their logs say, once none is left."""
        await asyncio.gather(*(node.load_when() for node in self.nodes.values()))
        logs = self.setup.directory.glob("prefill-*.log")
        return sum(log.read_text().count("expired: nobody renewed or released it") for log in logs)

    async def wait_live(self, *names: str) -> None:
        """Waits until the router takes these nodes for live."""
        async with asyncio.timeout(LIVE_SECONDS):
            while not set(names) <= await self.live():
                await asyncio.sleep(0.1)

    async def stop(self) -> dict[str, int]:
        """Ends the router, then the nodes, and returns their exit statuses by name."""
        await self.disconnect()
        statuses = {"router": await self.router.terminate()}
        for node, status in zip(
            self.nodes.values(), await asyncio.gather(*(node.terminate() for node in self.nodes.values())), strict=True
        ):
            statuses[node.name] = status
        return statuses


@asynccontextmanager
async def chaos_cluster(setup: Setup) -> AsyncIterator[ChaosCluster]:
    setup.pools.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_NUM_THREADS": "1"}
    secret = {"KVRELAY_CLUSTER_SECRET": secrets.token_hex(16)} if setup.connector == "ucx" else {}
    nodes = [ChaosNode(name, setup, environment | secret) for name in NODE_NAMES]
    for node in nodes:
        await node.proxy.start()
    lists: list[str] = []
    for role in ("prefill", "decode"):
        lists += [f"--{role}-nodes", ",".join(node.proxy.address for node in nodes if node.role == role)]
    policy = ["--local-prefill-max-tokens", str(setup.local_prefill_max_tokens), "--lease-ttl", str(setup.lease_ttl)]
    command = ["router", str(setup.model), *FREE_PORTS, *lists, *policy, "--served-model-name", "demo"]
    router = ChaosProcess("router", command, setup.directory, environment)
    cluster = ChaosCluster(setup, nodes, router)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.disconnect()
        for process in (router, *nodes):
            process.close()
        for node in nodes:
            await node.proxy.close()


def rss_of(pid: int) -> int:
    """Returns the bytes of memory that only this process has, which leaves out the pool, a mapped file."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not tell the memory of process {pid}")


def _be_nice(pid: int) -> None:
    """Lowers the priority of a process that serves, so that on few cores a restart does not take half a minute."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), _NICENESS)
