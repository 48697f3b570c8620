"""bench/peers without a peer: prompts that count the same in both forms, ratios, our worker, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from tokenizers import Tokenizer

from bench import random_model
from bench.peers import __main__ as peers
from bench.peers import llama_cpp, vllm_nixl
from bench.peers.__main__ import IN_PROCESS, SERVERS, PeersSettings, kvrelay_of, render, server_of
from bench.peers.base import Peer, PeerError, Server
from bench.peers.compare import Measurement, ratios
from bench.peers.environment import Environment
from bench.peers.in_process import InProcessPeer
from bench.peers.llama_cpp import SOURCE_PACKAGE, LlamaCpp
from bench.peers.processes import run
from bench.peers.vllm_cpu import VllmCpu, vllm_variables
from bench.peers.vllm_nixl import FEW_CORES, VllmNixl
from bench.peers.worker_kvrelay import figures_of_job
from bench.peers.workloads import ComparedFigure, settings_of, vocabulary_settings
from bench.random_model import kept_model, write_byte_tokenizer, write_random_model
from kvrelay.bench.plan import plans_of
from kvrelay.bench.prompts import PromptBuilder, Vocabulary
from kvrelay.bench.settings import ServeBenchSettings
from kvrelay.engine import pool_size


def test_a_prompt_of_text_has_as_many_tokens_as_one_of_ids(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, vocab_size=4096)
    vocabulary = vocabulary_settings("text", tmp_path, 4096)
    server = Server("http://127.0.0.1:1", "m", 0.0, takes_ignore_eos=False)
    settings = settings_of("A", server, vocabulary, seed=3, scale=1.0)
    assert (settings.ignore_eos, settings.effective_prompt_format) == (False, "text")
    [plan] = plans_of(settings)
    builder = PromptBuilder(Vocabulary.of_tokenizer(str(settings.tokenizer)), "text", seed=3)
    requests = [request for session in plan.sessions for request in session.requests]
    texts = ["".join(builder.text_pieces(request.segments)) for request in requests]
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert {len(tokenizer.encode(text).ids) for text in texts} == {512}
    assert len(set(texts)) == len(texts) >= 6


def test_a_quota_that_only_kvrelay_would_notice_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "exit_on_signals", lambda: None)
    monkeypatch.setattr(peers, "available_cores", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert peers.main(["--peer", "llama-cpp"]) == 1
    assert "leaves 1 of 16 cores, which only kvrelay would notice: bind this command" in capsys.readouterr().out
    peers.check_cores(2, 2)


def test_settings_of_the_shell_change_no_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_STREAMS", "2")
    monkeypatch.setenv("KVRELAY_ENDPOINT", "chat")
    monkeypatch.setenv("KVRELAY_MAX_NUM_SEQS", "4")  # our cluster would have it, and the peer would not
    monkeypatch.setenv("VLLM_PLUGINS", "none")  # the peer would have it
    monkeypatch.setenv("LLAMA_ARG_CACHE_TYPE_K", "q4_0")
    monkeypatch.setattr(peers, "_comparison", Mock(side_effect=PeerError("not installed here")))
    monkeypatch.setattr(peers, "exit_on_signals", lambda: None)
    assert peers.main(["--rounds", "1"]) == 1
    assert not any(name.startswith(("KVRELAY_", "VLLM_", "LLAMA_ARG_")) for name in os.environ)
    server = Server("http://127.0.0.1:1", "m", 0.0)
    settings = settings_of("D", server, {"vocab_size": 4096}, seed=0, scale=1.0)
    assert isinstance(settings, ServeBenchSettings) and settings.streams == 8


def test_workloads_of_equal_and_of_other_seeds_share_no_prompt() -> None:
    """A server may have cached what an earlier workload or round has sent."""
    server = Server("http://127.0.0.1:1", "m", 0.0)
    vocabulary = {"prompt_format": "token_ids", "vocab_size": 4096}
    beginnings = []
    for seed in (0, 1):
        for workload in ("A", "B"):
            settings = settings_of(workload, server, vocabulary, seed=seed, scale=1.0)
            [plan] = plans_of(settings)
            builder = PromptBuilder(Vocabulary.of_size(4096), "token_ids", seed=settings.seed)
            requests = [request for session in plan.sessions for request in session.requests]
            beginnings += [tuple(builder.token_ids(request.segments)[:16]) for request in requests]
    assert len(set(beginnings)) == len(beginnings) == 2 * (6 + 32)


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.05, 0.01])
def test_a_scaled_load_has_enough_requests_to_run_at_a_time(scale: float) -> None:
    settings = settings_of("B", Server("http://127.0.0.1:1", "m", 0.0), {"vocab_size": 4096}, seed=0, scale=scale)
    [plan] = plans_of(settings)
    assert plan.max_concurrency is not None and 1 <= plan.max_concurrency <= len(plan.sessions)
    assert scale < 1 or (plan.max_concurrency, len(plan.sessions)) == (16, 32)


def test_ratios_are_of_the_same_round() -> None:
    values = {("ours", 0): 20.0, ("theirs", 0): 10.0, ("theirs", 1): 40.0, ("ours", 1): 20.0}
    measured = [
        Measurement(engine, number, "B", ComparedFigure("output tokens/s", value, higher_is_better=True))
        for (engine, number), value in values.items()
    ]
    [ratio] = ratios(measured, "ours", "theirs")
    assert (ratio.ours, ratio.theirs, ratio.by_round) == (20.0, 25.0, (2.0, 0.5))
    assert "1.25 (0.50 - 2.00), more is better" in render([ratio], "ours", "theirs")


def test_our_worker_does_a_whole_job(tmp_path: Path) -> None:
    job = {
        "first": [[301, 302, 303]],
        "single": [[304, 305]],
        "warm_batch": [[309, 310]],
        "batch": [[306], [307, 308]],
    }
    found = figures_of_job(write_random_model(tmp_path, "tiny"), job, num_tokens=4, concurrency=2)
    assert {name: len(values) for name, values in found.items() if min(values) > 0} == {
        "ready_seconds": 1,
        "first_seconds": 1,
        "single_seconds": 1,
        "single_tokens": 1,
        "batch_seconds": 1,
        "batch_tokens": 2,
    }
    assert (found["single_tokens"], found["batch_tokens"]) == ([4], [4, 4])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peer": "openvino-genai", "workloads": "C"}, "no 'C' for openvino-genai; there are A, B"),
        ({"workloads": "A,E"}, "no 'E' for vllm-cpu; there are A, B, C, D"),
        ({"workloads": "A,B,A"}, "--workloads: each only once"),
        ({"peer": "vllm-cpu-nixl", "together": True}, "no server that rests between requests"),
        ({"topology": "1P1D"}, "'1P1D' is no topology: write the prefill and the decode nodes like"),
        ({"topology": "1P+0D"}, "at least one decode node is needed"),
        ({"peer": "openvino-genai", "topology": "1P+1D"}, "--topology: with openvino-genai, both engines run in"),
        ({"peer": "openvino-genai", "serve_arguments": "--x"}, "--serve-arguments: with openvino-genai, both"),
        ({"peer": "openvino-genai", "peer_arguments": "--x"}, "--peer-arguments: with openvino-genai, both engines"),
        ({"peer": "openvino-genai", "top_p": 0.9}, "--top-p: with openvino-genai, both engines decode greedily"),
        ({"serve_arguments": "--model 'x"}, "No closing quotation"),
        ({"peer_arguments": "--model 'x"}, "No closing quotation"),
        ({"json_file": "/nowhere/result.json"}, "this file cannot be written"),
    ],
)
def test_what_a_peer_can_not_do_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PeersSettings.model_validate(values)


def test_arguments_of_serve_may_hold_commas() -> None:
    settings = PeersSettings.model_validate(
        {"topology": "0p+2d", "serve_arguments": "--connector shared_memory,redis --served-model-name 'a b'"}
    )
    kvrelay = kvrelay_of(settings)
    assert (kvrelay.name, kvrelay.topology.arguments) == (
        "kvrelay 0P+2D",
        ["--prefill-nodes", "0", "--decode-nodes", "2"],
    )
    assert kvrelay.arguments == ("--connector", "shared_memory,redis", "--served-model-name", "a b")


@pytest.mark.parametrize("peer", SERVERS)
def test_further_arguments_of_a_peer_are_named_in_its_result(peer: str) -> None:
    settings = PeersSettings.model_validate({"peer": peer, "peer_arguments": "--dtype float32"})
    server = server_of(settings)
    assert server.name == peer
    assert set(SERVERS[peer].setup.options) < set(server.setup.options) >= {"--dtype", "float32"}


@pytest.mark.parametrize("peer", [peer for name, peer in SERVERS.items() if name.startswith("vllm")])
def test_servers_of_vllm_have_as_much_kv_as_a_node_of_ours(peer: Peer) -> None:
    assert f"VLLM_CPU_KVCACHE_SPACE={pool_size._DEFAULT_POOL_BYTES / (1 << 30):g}" in peer.setup.options


def test_vllm_is_not_compared_with_without_the_allocator_that_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "LD_PRELOAD=libiomp5.so:libtcmalloc_minimal.so" in VllmCpu().setup.options
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(PeerError, match="install the system's package libtcmalloc-minimal4"):
        VllmCpu().install(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_server_of_vllm_has_the_same_variables_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compile its model again, which is no part of a second start."""
    monkeypatch.setattr(vllm_nixl, "vllm_variables", lambda directory: {})
    ports = [
        VllmNixl("nixl", is_tuned=False)._variables(tmp_path, role)["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        for role in ("prefill", "decode", "prefill", "decode")
    ]
    assert ports[:2] == ports[2:] and ports[0] != ports[1]


def test_a_peer_has_the_cores_that_we_have() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    assert f"VLLM_CPU_OMP_THREADS_BIND={','.join(map(str, cpus))}" in VllmCpu().setup.options
    os.sched_setaffinity(0, cpus[:1])
    try:
        assert f"VLLM_CPU_OMP_THREADS_BIND={cpus[0]}" in VllmCpu().setup.options
        assert " --threads 1 --threads-batch 1 " in " ".join(LlamaCpp().setup.options)
    finally:
        os.sched_setaffinity(0, cpus)


def test_each_tuned_server_of_two_has_half_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 1), (16, 8)):
        monkeypatch.setattr(vllm_nixl, "available_cores", lambda cores=cores: cores)
        assert f"OMP_NUM_THREADS={threads}" in VllmNixl("tuned", is_tuned=True).setup.options


@pytest.mark.parametrize("folder", ["a b", "a:b"])
def test_a_folder_from_which_no_library_can_be_preloaded_is_refused(tmp_path: Path, folder: str) -> None:
    library = tmp_path / folder / "venv" / "lib" / "libiomp5.so"
    library.parent.mkdir(parents=True)
    library.touch()
    with pytest.raises(PeerError, match="choose a --directory without spaces and colons"):
        vllm_variables(tmp_path / folder)


def test_where_torch_without_cuda_is_not_found_the_error_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="set PIP_EXTRA_INDEX_URL to the package index of builds without CUDA"):
        Environment(tmp_path).install(["--no-index", "torch==2.13.0+cpu"])


def test_other_sources_of_llama_cpp_are_another_installation(tmp_path: Path) -> None:
    peer = LlamaCpp()
    server = llama_cpp._server(tmp_path)
    server.parent.mkdir(parents=True)
    server.touch()
    environment = Environment(tmp_path)
    environment.finish(peer.setup.requirements)
    assert peer.is_installed(tmp_path)
    environment.finish([name.replace(SOURCE_PACKAGE, "llama-cpp-python==0.3.15") for name in peer.setup.requirements])
    assert not peer.is_installed(tmp_path)


def test_an_environment_whose_making_was_interrupted_is_made_whole(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], environment.log)
    (environment.bin / "activate").unlink()
    environment.install(["--no-index", "pip"])


def test_a_model_whose_writing_was_interrupted_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(random_model, "write_byte_tokenizer", Mock(side_effect=KeyboardInterrupt))
        kept_model(tmp_path, "tiny")
    model = kept_model(tmp_path, "tiny")
    assert {path.name for path in model.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert [path.name for path in model.parent.iterdir()] == ["tiny"]


@pytest.mark.parametrize("peer", [*SERVERS.values(), *IN_PROCESS.values()], ids=lambda peer: peer.name)
def test_a_result_can_name_what_it_compares_with(peer: Peer | InProcessPeer) -> None:
    setup = peer.setup
    assert all("==" in requirement for requirement in setup.requirements if requirement not in ("requests", "psutil"))
    assert setup.options and all(isinstance(option, str) for option in setup.options)


def test_vllm_finds_the_plugin_for_few_cores(tmp_path: Path) -> None:
    """Loads the plugin as vllm does, from the entry points in PYTHONPATH. A stand-in has NIXL's signature."""
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").touch()
    (tmp_path / "nixl" / "_api.py").write_text(
        "from types import SimpleNamespace\n"
        "nixlBind = SimpleNamespace(nixlAgent=lambda name, config: (name, config.pthrDelay))\n"
    )
    script = (
        "import os; from importlib.metadata import entry_points\n"
        "[plugin.load()() for plugin in entry_points(group='vllm.general_plugins')]\n"
        "cores = os.sched_getaffinity(0); os.sched_setaffinity(0, [max(cores) + 1])\n"
        "from nixl._api import SimpleNamespace, nixlBind\n"
        "print(os.sched_getaffinity(0) == cores, nixlBind.nixlAgent('agent', SimpleNamespace(pthrDelay=0)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{FEW_CORES}:{tmp_path}"}
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout == "True ('agent', 1000)\n"
