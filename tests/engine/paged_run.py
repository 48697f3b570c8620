"""Runs a decoder as the engine does, without the engine: chunks of sequences in a small pool whose blocks are in
disorder."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from paged_kernels.base import AttentionMetadata, LastTokens
from torch import Tensor

from kvrelay.engine.models.decoder import DecoderForCausalLM
from tests.engine.reference import Reference


@dataclass(slots=True)
class PagedRun:
    """Sequences of one model, each with room for `max_tokens` tokens in blocks drawn at random from a pool full of
    NaN."""

    model: DecoderForCausalLM
    num_sequences: int
    max_tokens: int
    block_size: int = 16
    seed: int = 0
    pool: Tensor = field(init=False)
    block_tables: Tensor = field(init=False)  # [num_sequences, blocks_per_sequence]
    num_computed: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config
        per_sequence = -(-self.max_tokens // self.block_size)
        num_blocks = 3 + self.num_sequences * per_sequence
        shape = (num_blocks, config.num_kv_heads, config.num_layers, 2, self.block_size, config.head_dim)
        self.pool = torch.full(shape, float("nan"), dtype=self.model.dtype)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(self.seed))
        self.block_tables = order[: self.num_sequences * per_sequence].view(self.num_sequences, per_sequence).int()
        self.num_computed = [0] * self.num_sequences

    @torch.inference_mode()
    def step(self, chunks: Sequence[Sequence[int]], last_of: Sequence[int] | None = None) -> list[Tensor]:
        """Computes the next tokens of every sequence, at least one each. Returns logits per sequence, `[num_tokens,
        vocab_size]`, or with `last_of` those of the last token of each of these sequences, `[1, vocab_size]`."""
        query_lens = [len(chunk) for chunk in chunks]
        positions = torch.cat(
            [torch.arange(start, start + n) for start, n in zip(self.num_computed, query_lens, strict=True)]
        )
        owners = torch.repeat_interleave(torch.arange(self.num_sequences), torch.tensor(query_lens))
        blocks = self.block_tables[owners, positions // self.block_size].long()
        self.num_computed = [start + n for start, n in zip(self.num_computed, query_lens, strict=True)]
        metadata = AttentionMetadata(
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            block_tables=self.block_tables,
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(self.num_computed, dtype=torch.int32),
            max_query_len=max(query_lens),
            max_seq_len=max(self.num_computed),
        )
        input_ids = torch.tensor([token_id for chunk in chunks for token_id in chunk])
        last = None if last_of is None else LastTokens.of(metadata, torch.tensor(last_of, dtype=torch.int64))
        hidden = self.model.forward(input_ids, positions, self.pool, metadata, last)
        rows = query_lens if last_of is None else [1] * len(last_of)
        return list(torch.split(self.model.compute_logits(hidden), rows))


def check_greedy(model: DecoderForCausalLM, reference: Reference, prompt: Sequence[int], *, num_tokens: int) -> None:
    """Checks that the prompt as one chunk and then `num_tokens` single tokens give the reference's tokens and, up to
    rounding, its logits."""
    run = PagedRun(model, num_sequences=1, max_tokens=len(prompt) + num_tokens)
    logits, tokens = run.step([prompt])[0], list(prompt)
    torch.testing.assert_close(logits, reference.logits(tokens), atol=2e-4, rtol=2e-4)
    for _ in range(num_tokens):
        tokens.append(int(logits[-1].argmax()))
        logits = run.step([tokens[-1:]])[0]
    expected = reference.logits(tokens)
    assert tokens[len(prompt) :] == expected[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    torch.testing.assert_close(logits[-1], expected[-1], atol=2e-4, rtol=2e-4)
