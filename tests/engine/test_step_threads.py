"""How many threads a step runs on: as the table says at every layer, with results that do not depend on it."""

import os
from collections.abc import Iterator

import pytest
import torch
from paged_kernels.base import AttentionMetadata
from paged_kernels.registry import select_backend
from torch import Tensor

from kvrelay.core.core_table import CoreShare, CoreTable
from kvrelay.engine.models.decoder import DecoderForCausalLM
from kvrelay.engine.models.loader import load_model
from kvrelay.engine.options import EngineOptions
from kvrelay.engine.step_threads import StepThreads
from tests.engine.test_engine import Harness, prompt_of, request
from tests.engine.tiny_models import make_tiny_model

BLOCK_SIZE = 16


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def shares() -> Iterator[tuple[CoreShare, CoreShare]]:
    """Of two nodes with a core each."""
    descriptor = CoreTable.create(2, 2)
    table = CoreTable(descriptor)
    os.close(descriptor)  # the mapping stays
    yield CoreShare(table, 0, 1), CoreShare(table, 1, 1)


def test_cores_are_taken_and_given_back_between_layers(shares: tuple[CoreShare, CoreShare]) -> None:
    ours, other = shares
    threads = StepThreads(ours)
    threads.begin_step()
    found = [torch.get_num_threads()]
    for change in (other.claim, other.claim, other.release):
        change()
        threads.adjust()
        found.append(torch.get_num_threads())
    assert found == [2, 1, 1, 2]
    assert other.available() == 0
    threads.rest()
    other.claim()
    assert other.available() == 2
    threads.begin_step()
    assert torch.get_num_threads() == 1
    assert threads.num_lent_steps == 1


def test_without_a_table_torch_keeps_its_number() -> None:
    torch.set_num_threads(2)
    threads = StepThreads()
    for step in (threads.begin_step, threads.adjust, threads.rest):
        step()
        assert torch.get_num_threads() == 2
    assert threads.num_lent_steps == 0


def test_a_node_finds_its_entry() -> None:
    assert EngineOptions(model="m").core_share() is None
    descriptor = CoreTable.create(4, 2)
    share = EngineOptions(model="m", threads=2, core_table=f"{descriptor}:1").core_share()
    os.close(descriptor)
    assert share is not None and (share.entry, share.num_cores) == (1, 2)
    share.claim()
    assert share.available() == 4


def test_an_engine_claims_its_cores_while_it_has_work(shares: tuple[CoreShare, CoreShare]) -> None:
    ours, other = shares
    other.claim()
    harness = Harness(threads=StepThreads(ours))
    harness.step()
    assert other.available() == 2
    harness.engine.add(request("a", prompt_of(5), 3))
    while harness.step():
        assert other.available() == 1
    assert other.available() == 2
    other.release()
    harness.engine.add(request("b", prompt_of(7), 3))
    while harness.step():
        pass
    load = harness.engine.load()
    assert 0 < load.num_lent_steps < load.num_steps
    harness.engine.check_idle()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderForCausalLM:
    """Every product of it is by kernels of our own."""
    directory = make_tiny_model("llama", tmp_path_factory.mktemp("llama"), vocab_size=320)
    attention = select_backend("native")
    loaded = load_model(str(directory), dtype="bfloat16", attention=attention, max_model_len=None, quantization="int8")
    return loaded.model


def logits_of(model: DecoderForCausalLM, num_tokens: int, threads_by_layer: tuple[int, ...]) -> Tensor:
    """Of all positions of one prompt."""
    config = model.config
    pool = torch.zeros(8, config.num_kv_heads, config.num_layers, 2, BLOCK_SIZE, config.head_dim, dtype=torch.bfloat16)
    positions = torch.arange(num_tokens)
    metadata = AttentionMetadata(
        slot_mapping=positions,
        block_tables=torch.arange(8, dtype=torch.int32)[None],
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    layers = iter(threads_by_layer)
    hidden = model.forward(
        positions * 7 % 300, positions, pool, metadata, before_layer=lambda: torch.set_num_threads(next(layers))
    )
    assert next(layers, None) is None, "once a layer"
    return model.compute_logits(hidden)


@pytest.mark.parametrize("num_tokens", [1, 3, 120])
def test_the_number_of_threads_changes_no_bit(model: DecoderForCausalLM, num_tokens: int) -> None:
    with torch.inference_mode():
        alone = logits_of(model, num_tokens, (1, 1, 1))
        assert torch.equal(logits_of(model, num_tokens, (2, 2, 2)), alone)
        assert torch.equal(logits_of(model, num_tokens, (2, 1, 3)), alone)
