"""The options of an engine: their values, and the limits of a step that they leave open."""

from dataclasses import fields
from typing import get_type_hints

import pytest
import torch
from pydantic.fields import FieldInfo

from kvrelay.core.errors import ConfigurationError
from kvrelay.engine.options import EngineOptions
from kvrelay.node.settings import NodeSettings


@pytest.mark.parametrize(("device", "limits"), [("cpu", (64, 512, 0)), ("cuda", (256, 2048, 2048))])
def test_a_gpu_gets_larger_steps(device: str, limits: tuple[int, int, int]) -> None:
    sized = EngineOptions("m").sized_for(torch.device(device))
    assert (sized.max_num_seqs, sized.max_num_batched_tokens, sized.max_num_mixed_tokens) == limits
    given = EngineOptions("m", max_num_seqs=3, max_num_batched_tokens=32, max_num_mixed_tokens=24)
    assert given.sized_for(torch.device(device)) == given


def test_a_step_of_a_few_tokens_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^max_num_batched_tokens 15 is less than 16; raise it"):
        EngineOptions("m", max_num_batched_tokens=15).sized_for(torch.device("cpu"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_can_compute_a_token_of_every_sequence(device: str) -> None:
    """Otherwise the sequences that came last would wait until others end."""
    few_tokens = EngineOptions("m", max_num_batched_tokens=32).sized_for(torch.device(device))
    assert (few_tokens.max_num_seqs, few_tokens.max_num_batched_tokens) == (32, 32)
    many_seqs = EngineOptions("m", max_num_seqs=4096).sized_for(torch.device(device))
    assert (many_seqs.max_num_seqs, many_seqs.max_num_batched_tokens) == (4096, 4096)
    with pytest.raises(ConfigurationError, match=r"^max_num_batched_tokens 32 is less than max_num_seqs 33.*raise"):
        EngineOptions("m", max_num_seqs=33, max_num_batched_tokens=32).sized_for(torch.device(device))


# `model` is a positional argument of a command.
@pytest.mark.parametrize("option", [one.name for one in fields(EngineOptions) if one.name != "model"])
def test_a_node_takes_the_values_and_the_default_that_its_engine_takes(option: str) -> None:
    setting = NodeSettings.model_fields[option]
    allowed = FieldInfo.from_annotation(get_type_hints(EngineOptions, include_extras=True)[option])
    assert (setting.annotation, setting.metadata) == (allowed.annotation, allowed.metadata)
    assert setting.default == getattr(EngineOptions("m"), option)
