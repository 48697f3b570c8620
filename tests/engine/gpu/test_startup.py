"""The start of an engine on a GPU, with stand-ins for what needs one."""

import re
from typing import Any
from unittest import mock

import pytest
import torch

from kvrelay.core.errors import ConfigurationError
from kvrelay.core.kv.layout import KVLayout
from kvrelay.engine import startup as engine_startup
from kvrelay.engine.device import Gpu, Machine
from kvrelay.engine.gpu import startup
from kvrelay.engine.gpu.memory_profile import MemoryProfile
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.out_of_memory import GpuMemoryError, out_of_memory_as_configuration_error

GIB = 1 << 30
LAYOUT = KVLayout(num_kv_heads=2, num_layers=4, block_size=16, head_dim=64, dtype="bfloat16")
OPTIONS = EngineOptions("m", max_num_seqs=4, max_num_batched_tokens=64)
LOADED: Any = mock.Mock(max_model_len=4096, config=mock.Mock(vocab_size=320, eos_token_ids=(2,)))


@pytest.mark.parametrize(
    ("options", "records"),
    [
        (OPTIONS, True),
        (EngineOptions("m", enforce_eager=True), False),
        (EngineOptions("m", attention_backend="reference"), False),
    ],
)
def test_decode_steps_are_recorded_where_they_can_be_and_are_wanted(
    options: EngineOptions, records: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, runner, recorder = mock.Mock(), mock.Mock(), mock.Mock()
    profile.return_value = MemoryProfile(total=80 * GIB, free=70 * GIB, resident=GIB, step=GIB, graphs=0)
    monkeypatch.setattr(startup, "profile_memory", profile)
    monkeypatch.setattr(startup, "GpuRunner", runner)
    monkeypatch.setattr(startup, "CudaGraphRecorder", recorder)
    assert startup.size_gpu_pool(options, LOADED, LAYOUT).num_blocks > 0
    assert profile.call_args.kwargs == {"graphs": records}
    assert startup.gpu_runner(options, LOADED, torch.empty(0), 4096) is runner.return_value
    assert runner.call_args.args[-1] == (recorder.return_value if records else None)


FULL = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB\nand much more to say"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    GpuMemoryError("the GPU has no memory for a step of 64 tokens"),
)


@pytest.mark.parametrize("error", FULL, ids=lambda error: str(error)[:30])
def test_a_full_gpu_is_recognised_whoever_says_so(error: Exception) -> None:
    expected = f"lower something ({str(error).splitlines()[0]})"
    with (
        pytest.raises(ConfigurationError, match=f"^{re.escape(expected)}$"),
        out_of_memory_as_configuration_error("lower something"),
    ):
        raise error


def test_other_errors_of_a_gpu_stay_what_they_are() -> None:
    with (
        pytest.raises(RuntimeError, match="illegal memory access"),
        out_of_memory_as_configuration_error("lower something"),
    ):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_no_room_for_the_weights_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu("a GPU", 24 * GIB, (8, 9))
    monkeypatch.setattr(engine_startup, "look_at_machine", lambda: Machine(True, True, gpu))
    monkeypatch.setattr(engine_startup, "load_model", mock.Mock(side_effect=torch.OutOfMemoryError("3 GiB")))
    with pytest.raises(ConfigurationError, match=r"weights of m do not fit on cuda:0: end what else.*AWQ.*3 GiB"):
        engine_startup.prepare_engine(OPTIONS)


def test_no_room_for_a_step_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "profile_memory", mock.Mock(side_effect=torch.OutOfMemoryError("2 GiB")))
    with pytest.raises(ConfigurationError, match=r"step of 64 tokens.*max_num_batched_tokens.*2 GiB"):
        startup.size_gpu_pool(OPTIONS, LOADED, LAYOUT)


def test_no_room_for_recorded_steps_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "GpuRunner", mock.Mock(side_effect=torch.OutOfMemoryError("1 GiB")))
    monkeypatch.setattr(startup, "CudaGraphRecorder", mock.Mock())
    with pytest.raises(ConfigurationError, match=r"gpu_memory_utilization.*enforce_eager.*1 GiB"):
        startup.gpu_runner(OPTIONS, LOADED, torch.empty(0), 4096)
