"""Steps that compute prompts: our model against the same one with oneDNN's products, where oneDNN has any for this
processor.

    python -m bench.prefill_step DIR --threads 2
    python -m bench.prefill_step DIR --threads 2 --quantization int8     against the same model in bfloat16

DIR is a bfloat16 model (`python -m bench.random_model DIR --shape qwen2-0.5b`). A step of `--steps` lists its
sequences, separated by commas: each is `new:cached` tokens, with `count*` before it for several that are alike. So
512:0 is a prompt, 64:1024 a chunk behind 1,024 cached tokens, and '16*1:300,112:0' are 16 decodes and a chunk.

Measured is the forward pass with the logits of the last tokens, without the engine. Both models take turns in every
round; the ratio is the median of the rounds' ratios.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import get_args
from unittest import mock

import torch
from paged_kernels.base import AttentionMetadata, LastTokens
from paged_kernels.cpu import packed
from paged_kernels.cpu.packed import PackedWeight
from paged_kernels.cpu.threads import use_threads
from paged_kernels.registry import select_backend
from torch import Tensor

from bench.arguments import add_threads, positive, script_parser
from bench.in_turn import measure_in_turn
from bench.onednn_products import has_onednn_products, onednn_linear, onednn_weight
from bench.timing import torch_computes, wall_seconds
from kvrelay.core.config.option_types import Quantization
from kvrelay.core.errors import KVRelayError
from kvrelay.engine.layers.linear import Linear
from kvrelay.engine.loading.loader import load_model
from kvrelay.engine.models.decoder import DecoderForCausalLM

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
STEPS = ("512:0", "128:0", "64:1024", "33:1024", "16*1:300,112:0")


@dataclass(frozen=True, slots=True)
class StepSpec:
    """A step as it was written, and its sequences as (new, cached) tokens."""

    text: str
    sequences: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> "StepSpec":
        """Raises ArgumentTypeError, whose message argparse shows."""
        sequences: list[tuple[int, int]] = []
        for part in text.split(","):
            match = re.fullmatch(r"(?:([1-9]\d*)\*)?([1-9]\d*):(\d+)", part)
            if match is None:
                raise argparse.ArgumentTypeError(
                    f"{part!r}: write NEW:CACHED tokens, like 512:0, or COUNT*NEW:CACHED, like 16*1:300"
                )
            new, cached = int(match[2]), int(match[3])
            if new + cached > MAX_MODEL_LEN:
                raise argparse.ArgumentTypeError(f"{part!r}: a sequence has at most {MAX_MODEL_LEN} tokens")
            sequences += [(new, cached)] * int(match[1] or 1)
        return cls(text, tuple(sequences))


class WithOnednn:
    """A model whose products oneDNN computes within `entered()`, with a copy of the weights and on torch's threads. Its
    layers then run one operation at a time."""

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
    """The model that ours is compared with. It is measured within `entered()`."""

    name: str
    model: DecoderForCausalLM
    entered: Callable[[], AbstractContextManager[None]]

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the wall time of one call."""
        with self.entered():
            return wall_seconds(run)


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__file__, __doc__)
    parser.add_argument("model", metavar="DIR", help="directory of a bfloat16 model")
    parser.add_argument(
        "--steps",
        type=StepSpec.parse,
        nargs="+",
        default=[StepSpec.parse(text) for text in STEPS],
        metavar="STEP",
        help=f"[COUNT*]NEW:CACHED tokens of each sequence, separated by commas (default: {' '.join(STEPS)})",
    )
    add_threads(parser)
    parser.add_argument("--rounds", type=positive, default=7, help="measurements, besides one to warm up")
    parser.add_argument(
        "--quantization",
        choices=get_args(Quantization),
        default="none",
        help="form of our weights; other than none, the comparison is with bfloat16 in place of oneDNN",
    )
    arguments = parser.parse_args(argv)
    use_threads(arguments.threads)
    other: Other | None = None
    try:
        model = _load(arguments.model, arguments.quantization)
        if arguments.quantization != "none":
            other = Other("bfloat16", _load(arguments.model, "none"), nullcontext)
    except KVRelayError as error:
        sys.exit(f"bench.prefill_step: {error}")
    if other is None and has_onednn_products():
        other = Other("oneDNN", model, WithOnednn(model).entered)
    for spec in arguments.steps:
        _measure(spec, model, other, arguments.rounds)


def _load(directory: str, quantization: Quantization) -> DecoderForCausalLM:
    attention = select_backend("auto")
    loaded = load_model(
        directory, dtype="bfloat16", attention=attention, max_model_len=MAX_MODEL_LEN, quantization=quantization
    )
    return loaded.model


@torch.inference_mode()
def _measure(spec: StepSpec, model: DecoderForCausalLM, other: Other | None, rounds: int) -> None:
    ours = partial(wall_seconds, _step(model, spec.sequences))
    theirs = None if other is None else partial(other.seconds, _step(other.model, spec.sequences))
    found = measure_in_turn(rounds, ours, theirs)
    beside = ""
    if other is not None:
        beside = f", with {other.name} {statistics.median(found.theirs) * 1e3:.1f}; {found.ratio:.2f} of its time"
    print(f"{spec.text:>20}: {statistics.median(found.ours) * 1e3:.1f} ms{beside}")


def _step(model: DecoderForCausalLM, sequences: Sequence[tuple[int, int]]) -> Callable[[], Tensor]:
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


if __name__ == "__main__":
    main()
