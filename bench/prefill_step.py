"""Steps that compute prompts: ours beside the same model with oneDNN's products, piece by piece, where oneDNN has any
for this processor.

    python -m bench.prefill_step DIR --threads 2
    python -m bench.prefill_step DIR --threads 2 --quantization int8     beside the same model in bfloat16

DIR is a bfloat16 model (`python -m bench.random_model DIR --shape qwen2-0.5b`). A step is `new:cached` tokens of each
sequence, with `count*` before it for several: `16*1:300,112:0` are 16 decodes and a chunk of a prompt. Forward pass and
logits of the last tokens, without the engine. Both take turns in every round; the ratio is the median of the rounds'.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import get_args
from unittest import mock

import torch
from paged_kernels import packed
from paged_kernels.base import AttentionMetadata, LastTokens
from paged_kernels.packed import PackedWeight
from paged_kernels.registry import select_backend
from paged_kernels.threads import use_threads
from torch import Tensor

from bench.onednn_products import has_onednn_products, onednn_linear, onednn_weight
from bench.timing import torch_computes, wall_seconds
from kvrelay.core.option_types import Quantization
from kvrelay.engine.layers.linear import Linear
from kvrelay.engine.loading.loader import load_model
from kvrelay.engine.models.decoder import DecoderForCausalLM

BLOCK_SIZE = 16
STEPS = ("512:0", "128:0", "64:1024", "33:1024", "16*1:300,112:0")


class WithOnednn:
    """Within `entered()` oneDNN multiplies all rows, with weights of its own and on torch's threads, and no layer is
    compiled."""

    def __init__(self, model: DecoderForCausalLM) -> None:
        self._model, self._stack = model, model.stack
        linears = [*model.linear_layers(), model.lm_head]
        weights = [one.weight for one in linears if isinstance(one, Linear) and isinstance(one.weight, PackedWeight)]
        self._weights = {weight.panels.data_ptr(): onednn_weight(weight) for weight in weights}

    @contextmanager
    def entered(self) -> Iterator[None]:
        self._model.stack = None
        try:
            with mock.patch.object(packed, "linear", self._linear), torch_computes():
                yield
        finally:
            self._model.stack = self._stack

    def _linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        return onednn_linear(x, self._weights[weight.panels.data_ptr()], bias)


@dataclass(frozen=True, slots=True)
class Other:
    """What ours is measured beside: a model, as it is within `entered()`."""

    name: str
    model: DecoderForCausalLM
    entered: Callable[[], AbstractContextManager[None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--steps", nargs="+", default=STEPS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quantization", choices=get_args(Quantization), default="none")
    arguments = parser.parse_args()
    use_threads(arguments.threads)
    model = _load(arguments.model, arguments.quantization)
    other: Other | None = None
    if arguments.quantization != "none":
        other = Other("bfloat16", _load(arguments.model, "none"), nullcontext)
    elif has_onednn_products():
        other = Other("oneDNN", model, WithOnednn(model).entered)
    for spec in arguments.steps:
        _measure(spec, model, other, arguments.rounds)


def _load(directory: str, quantization: Quantization) -> DecoderForCausalLM:
    attention = select_backend("auto")
    loaded = load_model(directory, dtype="bfloat16", attention=attention, max_model_len=4096, quantization=quantization)
    return loaded.model


@torch.inference_mode()
def _measure(spec: str, model: DecoderForCausalLM, other: Other | None, rounds: int) -> None:
    run, run_other = _step(model, spec), None if other is None else _step(other.model, spec)
    ours, theirs = [], []
    for index in range(rounds + 1):  # the first one warms up
        before = 0.0
        if other is not None and run_other is not None:
            with other.entered():
                before = wall_seconds(run_other)
        after = wall_seconds(run)
        if index:
            ours.append(after)
            theirs.append(before)
    beside = ""
    if other is not None:
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        beside = f", with {other.name} {statistics.median(theirs) * 1e3:.1f}; {ratio:.2f} of its time"
    print(f"{spec:>20}: {statistics.median(ours) * 1e3:.1f} ms{beside}")


def _step(model: DecoderForCausalLM, spec: str) -> Callable[[], Tensor]:
    sequences = list(chain.from_iterable(_sequences(part) for part in spec.split(",")))
    config = model.config
    lengths = [new + cached for new, cached in sequences]
    width = -(-max(lengths) // BLOCK_SIZE)
    tables = torch.arange(len(sequences) * width, dtype=torch.int32).view(-1, width)
    shape = (tables.numel(), config.num_kv_heads, config.num_layers, 2, BLOCK_SIZE, config.head_dim)
    positions = torch.cat([torch.arange(cached, cached + new) for new, cached in sequences])
    owners = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor([new for new, _ in sequences]))
    starts = torch.tensor([0, *(new for new, _ in sequences)]).cumsum(0)
    metadata = AttentionMetadata(
        slot_mapping=tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        block_tables=tables,
        query_start_loc=starts.int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        max_query_len=max(new for new, _ in sequences),
        max_seq_len=max(lengths),
    )
    kv_pool = torch.randn(shape, dtype=torch.float32).to(model.dtype)
    input_ids = torch.randint(0, config.vocab_size, positions.shape)
    last = LastTokens.of(metadata, torch.arange(len(sequences)))
    return lambda: model.compute_logits(model.forward(input_ids, positions, kv_pool, metadata, last))


def _sequences(part: str) -> list[tuple[int, int]]:
    count, _, lengths = part.rpartition("*")
    new, cached = lengths.split(":")
    return [(int(new), int(cached))] * int(count or 1)


if __name__ == "__main__":
    main()
