"""What the sampler is to do, in plain Python numbers: one row, lists and float64."""

import math

import torch
from torch import Tensor

from kvrelay.core.generation.sampling_params import SamplingParams
from kvrelay.engine.sampling.sampler import SamplingRow
from kvrelay.engine.sampling.seen_tokens import SeenTokens

VOCAB_SIZE = 300  # two full groups of tokens and a partial one
EOS = 2


def make_logits(seed: int, num_rows: int = 1, *, vocab_size: int = VOCAB_SIZE, ties: bool = False) -> Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2.0
    return (logits * 2).round() / 2 if ties else logits


def adjusted(logits: Tensor, row: SamplingRow) -> list[float]:
    params = row.params
    values: list[float] = logits.to(torch.float64).tolist()
    for token_id, bias in params.biases:
        values[token_id] += bias
    if row.num_output_tokens < params.min_tokens:
        for token_id in (*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))):
            values[token_id] = -math.inf
    seen = row.seen or SeenTokens()
    for token_id, count in zip(seen.token_ids.tolist(), seen.output_counts.tolist(), strict=True):
        value = values[token_id]
        values[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        if count > 0:
            values[token_id] -= params.presence_penalty + params.frequency_penalty * count
    return values


def probabilities_of(values: list[float], params: SamplingParams) -> list[float]:
    largest = max(values)
    weights = [math.exp((value - largest) / params.temperature) for value in values]
    order = sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        goal = params.top_p * math.fsum(weights[token_id] for token_id in order)
        kept: list[int] = []
        while math.fsum(weights[token_id] for token_id in kept) < goal:
            kept.append(order[len(kept)])
        order = kept
    order = [token_id for token_id in order if weights[token_id] >= params.min_p]
    total = math.fsum(weights[token_id] for token_id in order)
    probabilities = [0.0] * len(values)
    for token_id in order:
        probabilities[token_id] = weights[token_id] / total
    return probabilities
