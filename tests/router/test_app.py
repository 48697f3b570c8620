"""The router as a process: its ready line, both ports, and an orderly end, also where torch cannot be imported."""

import asyncio
import json
import os
import resource
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette
from tokenizers import Tokenizer, models, pre_tokenizers

from kvrelay.core.generation.outputs import FinishReason, TokenOutput
from kvrelay.v1 import router_pb2, router_pb2_grpc
from router.app import http_config, listen
from tests.router.scripted_nodes import PATIENCE, ScriptedDecode, node_that_is_not_live, soon

ROOT = Path(__file__).resolve().parents[2]

# Runs a module as `python -m` does, in an interpreter where torch does not exist.
WITHOUT_TORCH = """
import runpy, sys
from importlib.machinery import PathFinder

class WithoutTorch(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ("torch", "triton") else super().find_spec(name, path, target)

sys.meta_path[:] = [WithoutTorch if finder is PathFinder else finder for finder in sys.meta_path]
sys.argv = ["router", *sys.argv[1:]]
runpy.run_module("router", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a directory with a tokenizer of a few whole words, and no model."""
    path = tmp_path_factory.mktemp("models") / "tiny-words"
    path.mkdir()
    words = {word: number for number, word in enumerate(("[UNK]", "hello", "world", "again"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


@asynccontextmanager
async def router_process(*arguments: str) -> AsyncIterator[Process]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
    environment["PYTHONPATH"] = str(ROOT)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WITHOUT_TORCH, *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready_line(process: Process) -> dict[str, str]:
    assert process.stdout is not None and process.stderr is not None
    async with asyncio.timeout(60):
        line = await process.stdout.readline()
        assert line, (await process.stderr.read()).decode()
    ready: dict[str, str] = json.loads(line)
    return ready


async def test_a_router_serves_without_torch_and_ends_on_sigterm(model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        decode = ScriptedDecode()
        await decode.start()
        stack.push_async_callback(decode.stop)
        flags = ("--decode-nodes", decode.address, "--port", "0", "--grpc-port", "0")
        process = await stack.enter_async_context(router_process(str(model_dir), *flags))
        ready = await ready_line(process)
        assert (ready["event"], ready["role"], ready["model"]) == ("ready", "router", str(model_dir))
        async with grpc.aio.insecure_channel(ready["grpc_address"]) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(service="kvrelay.v1.Router"))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await complete(ready, decode)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0


async def test_a_second_signal_ends_the_wait_for_running_requests(model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        decode = ScriptedDecode()
        await decode.start()
        stack.push_async_callback(decode.stop)
        flags = ("--decode-nodes", decode.address, "--port", "0", "--grpc-port", "0", "--stop-timeout", "3600")
        process = await stack.enter_async_context(router_process(str(model_dir), *flags))
        ready = await ready_line(process)
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=PATIENCE))
        url = f"http://{ready['http_address']}"
        posted = asyncio.create_task(client.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 1}))
        await decode.admit()
        process.send_signal(signal.SIGTERM)
        while (await client.get(f"{url}/readyz")).status_code == 200:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        answer = await posted
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the router is stopping")
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0


async def test_a_router_that_is_stopped_while_it_waits_for_nodes_does_not_say_that_it_is_ready(model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        silent = await stack.enter_async_context(node_that_is_not_live())
        waits = ("--start-timeout", "3600", "--node-silence", "3600")
        flags = ("--decode-nodes", silent.address, "--port", "0", "--grpc-port", "0", *waits)
        process = await stack.enter_async_context(router_process(str(model_dir), *flags))
        await soon(silent.watch_requests)
        process.terminate()
        async with asyncio.timeout(PATIENCE):
            stdout, stderr = await process.communicate()
        assert (process.returncode, stdout) == (0, b"")
        assert b"is served" not in stderr


async def test_readiness_follows_the_decode_nodes(model_dir: Path) -> None:
    async with AsyncExitStack() as stack:
        decode = ScriptedDecode()
        await decode.start()
        stack.push_async_callback(decode.stop)
        flags = ("--decode-nodes", decode.address, "--port", "0", "--grpc-port", "0")
        ready = await ready_line(await stack.enter_async_context(router_process(str(model_dir), *flags)))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(ready["grpc_address"]))
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=PATIENCE))
        health: Any = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="kvrelay.v1.Router"), timeout=PATIENCE)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await decode.stop()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        not_ready = await client.get(f"http://{ready['http_address']}/readyz")
        assert not_ready.status_code == 503 and "decode-0" in not_ready.json()["error"]["message"]
        assert (await client.get(f"http://{ready['http_address']}/livez")).status_code == 200
        whole = await health.Check(health_pb2.HealthCheckRequest(service=""))
        assert whole.status == health_pb2.HealthCheckResponse.SERVING
        decode.update(0, reset=True)
        await decode.start()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


async def complete(ready: dict[str, str], decode: ScriptedDecode) -> None:
    body = {"model": ready["model"], "prompt": "hello world", "max_tokens": 1, "temperature": 0}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
        posted = asyncio.create_task(client.post(f"http://{ready['http_address']}/v1/completions", json=body))
        admit = await decode.admit()
        assert admit.local_prefill and tuple(admit.prompt_token_ids) == (1, 2)
        decode.tokens(admit.request_id, TokenOutput(0, (3,), finish_reason=FinishReason.LENGTH))
        answer = await posted
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"].strip() == "again"


async def test_a_supervised_router_ends_with_its_standard_input(model_dir: Path) -> None:
    flags = ("--decode-nodes", "127.0.0.1:1", "--port", "0", "--grpc-port", "0", "--start-timeout", "0", "--supervised")
    async with router_process(str(model_dir), *flags) as process:
        await ready_line(process)
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0


async def test_requests_of_both_interfaces_have_the_same_largest_size(model_dir: Path) -> None:
    flags = ("--decode-nodes", "127.0.0.1:1", "--port", "0", "--grpc-port", "0", "--start-timeout", "0")
    async with router_process(str(model_dir), *flags, "--max-body-bytes", "10000") as process:
        ready = await ready_line(process)
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
            url = f"http://{ready['http_address']}/v1/completions"
            statuses = [(await client.post(url, json={"prompt": "x" * size})).status_code for size in (9000, 11000)]
        assert statuses == [503, 413]
        async with grpc.aio.insecure_channel(ready["grpc_address"]) as channel:
            stub: Any = router_pb2_grpc.RouterStub(channel)
            for size, code in ((9000, grpc.StatusCode.UNAVAILABLE), (11000, grpc.StatusCode.RESOURCE_EXHAUSTED)):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Generate(router_pb2.GenerateRequest(prompt="x" * size), timeout=PATIENCE)
                assert refused.value.code() is code


async def test_settings_that_cannot_work_end_the_router_with_a_message(model_dir: Path) -> None:
    async with router_process(str(model_dir)) as process:
        _, stderr = await process.communicate()
        assert process.returncode == 1
        assert b"--decode-nodes is empty" in stderr


@pytest.mark.parametrize("address", ["10.0.0.3", "http://10.0.0.3:7000", "10.0.0.3:99999"])
async def test_an_address_of_a_node_that_is_none_ends_the_router_with_a_message(model_dir: Path, address: str) -> None:
    async with router_process(str(model_dir), "--decode-nodes", address) as process:
        _, stderr = await process.communicate()
        assert process.returncode == 2
        assert b"--decode-nodes" in stderr and b"host:port" in stderr


async def test_addresses_that_are_listed_twice_end_the_router_with_a_message_that_names_them(model_dir: Path) -> None:
    flags = ("--prefill-nodes", "a:1,b:1,c:1", "--decode-nodes", "b:1,d:1,d:1")
    async with router_process(str(model_dir), *flags) as process:
        _, stderr = await process.communicate()
        assert process.returncode == 2
        assert b"listed twice among --prefill-nodes and --decode-nodes: b:1, d:1\n" in stderr


async def test_a_router_may_have_as_many_connections_as_the_system_allows(model_dir: Path) -> None:
    flags = ("--decode-nodes", "127.0.0.1:1", "--port", "0", "--grpc-port", "0", "--start-timeout", "0")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with AsyncExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
        process = await stack.enter_async_context(
            router_process(str(model_dir), *flags, "--max-concurrent-requests", str(hard))
        )
        await ready_line(process)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        process.terminate()
        _, stderr = await process.communicate()
        assert f"this process may open {hard} files".encode() in stderr, "fewer than its requests may need"


def test_events_do_not_wait_for_acknowledgements() -> None:
    """Without TCP_NODELAY each event after the first waits up to 40 ms for the client's kernel."""
    with ExitStack() as stack:
        listener, *_ = [stack.enter_context(listener) for listener in listen("127.0.0.1", 0)]
        stack.enter_context(socket.create_connection(listener.getsockname()))
        accepted = stack.enter_context(listener.accept()[0])
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_connections_that_come_at_once_are_accepted_in_few_turns_of_the_loop() -> None:
    """With many streams a turn takes long, and a health check must not wait for as many as there are connections."""

    async def count_turns(num_connections: int) -> int:
        loop, accepted = asyncio.get_running_loop(), asyncio.Semaphore(0)

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                transport.close()
                accepted.release()

        async with AsyncExitStack() as stack:
            listeners = listen("127.0.0.1", 0)
            for _ in range(num_connections):
                stack.enter_context(socket.create_connection(listeners[0].getsockname()))
            for listener in listeners:
                await stack.enter_async_context(await loop.create_server(Accepted, sock=listener))
            turns = 0
            for _ in range(num_connections):
                while accepted.locked():
                    await asyncio.sleep(0)
                    turns += 1
                await accepted.acquire()
            return turns

    assert uvloop.run(count_turns(64)) < 16


def test_load_balancers_close_an_idle_connection_first() -> None:
    """They do so after a minute. What they send on a connection that the router closes at that moment is lost."""
    assert http_config(Starlette()).timeout_keep_alive > 60
