"""Trains the demo model from nothing: makes the text, learns the tokenizer and the weights, saves, evaluates.

Invariant: the same arguments see the same documents in the same order. Master weights stay float32; the saved ones
are bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from demo import evaluate
from demo.corpus import Corpus
from demo.vocabulary import (
    BOS,
    END,
    EOS,
    PAD,
    EncodedDocument,
    Row,
    as_transformers,
    encode,
    pack,
    special_id,
    train_tokenizer,
)

MAX_POSITIONS: Final = 4096
ROPE_THETA: Final = 10000.0
WARMUP_STEPS: Final = 60
TOKENIZER_DOCUMENTS: Final = 30_000
LOG_EVERY: Final = 25


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed rows as tensors; tokens attend only within their own document."""

    token_ids: torch.Tensor  # [rows, row_length] int64
    attention_mask: torch.Tensor  # [rows, 1, row_length, row_length] bool
    targets: torch.Tensor  # [rows, row_length] int64: the next token, or -100 where nothing is learnt


def make_batch(rows: list[Row], row_length: int, pad_id: int) -> Batch:
    """Lays the documents of each row side by side and shifts the targets by one."""
    token_ids = torch.full((len(rows), row_length), pad_id)
    targets = torch.full((len(rows), row_length), -100)
    owner = torch.full((len(rows), row_length), -1)
    for i, row in enumerate(rows):
        at = 0
        for number, document in enumerate(row.documents):
            length = len(document.token_ids)
            ids = torch.tensor(document.token_ids)
            is_target = torch.tensor(document.is_target)
            token_ids[i, at : at + length] = ids
            owner[i, at : at + length] = number
            targets[i, at : at + length - 1] = torch.where(is_target, ids, -100)[1:]
            at += length
    same_document = owner[:, :, None] == owner[:, None, :]
    causal = torch.ones(row_length, row_length, dtype=torch.bool).tril()
    return Batch(token_ids, (same_document & causal)[:, None], targets)


def make_config(args: argparse.Namespace, tokenizer: Tokenizer) -> LlamaConfig:
    """Returns the shape of the model, whose vocabulary is padded to a multiple of 64."""
    return LlamaConfig(
        vocab_size=math.ceil(tokenizer.get_vocab_size() / 64) * 64,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=args.hidden_size // 8,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=special_id(tokenizer, BOS),
        eos_token_id=special_id(tokenizer, EOS),
        pad_token_id=special_id(tokenizer, PAD),
    )


def make_optimizer(model: LlamaForCausalLM, peak: float) -> torch.optim.AdamW:
    """Returns AdamW with weight decay on matrices only."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Returns a step's rate: a linear warm-up, then a cosine to a hundredth of the peak."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def batch_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Returns the mean cross entropy over the target positions; only those are projected to the vocabulary."""
    learnt = batch.targets != -100
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(
            input_ids=batch.token_ids, attention_mask=batch.attention_mask, use_cache=False
        ).last_hidden_state  # [rows, row_length, hidden_size]
        logits = model.lm_head(hidden[learnt])  # [num_targets, vocab_size]
    return functional.cross_entropy(logits.float(), batch.targets[learnt])


def train(model: LlamaForCausalLM, documents: Iterator[EncodedDocument], args: argparse.Namespace) -> None:
    """Runs all steps and prints the mean loss and the time left now and then."""
    optimizer = make_optimizer(model, args.learning_rate)
    pad_id = int(model.config.pad_token_id or 0)
    model.train()
    started, recent = time.monotonic(), 0.0
    for step in range(args.steps):
        rows = pack(documents, args.row_length, args.rows)
        loss = batch_loss(model, make_batch(rows, args.row_length, pad_id))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.learning_rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent += loss.item()
        if (step + 1) % LOG_EVERY == 0 or step + 1 == args.steps:
            count = (step % LOG_EVERY) + 1
            elapsed = time.monotonic() - started
            left = elapsed / (step + 1) * (args.steps - step - 1)
            print(
                f"step {step + 1}/{args.steps} loss {recent / count:.4f} {elapsed:.0f} s, {left:.0f} s left", flush=True
            )
            recent = 0.0


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, output: Path) -> None:
    """Writes a Hugging Face directory: configuration, bfloat16 weights, tokenizer, chat template, stop tokens."""
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    stops = [special_id(tokenizer, EOS), special_id(tokenizer, END)]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=special_id(tokenizer, BOS), eos_token_id=stops, pad_token_id=special_id(tokenizer, PAD)
    )
    model.save_pretrained(output)
    as_transformers(tokenizer, MAX_POSITIONS).save_pretrained(output)
    make_readable_for_older_transformers(output)
    (output / "model.safetensors").chmod(0o644)


def make_readable_for_older_transformers(output: Path) -> None:
    """Adds the names that transformers 4 looks for; transformers 5 reads both."""
    config_path, tokenizer_path = output / "config.json", output / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    write_json(config_path, config | {"rope_theta": ROPE_THETA, "torch_dtype": "bfloat16"})
    tokenizer_config = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    if "extra_special_tokens" in tokenizer_config:
        tokenizer_config["additional_special_tokens"] = tokenizer_config.pop("extra_special_tokens")
    write_json(tokenizer_path, tokenizer_config | {"tokenizer_class": "PreTrainedTokenizerFast"})


def write_json(path: Path, content: dict[str, object]) -> None:
    """Writes JSON, sorted and indented so that two versions can be compared."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def parse_args() -> argparse.Namespace:
    """Reads the command line. The committed model was trained with the defaults."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.train", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=evaluate.HERE / "model", help="directory for the model")
    parser.add_argument("--steps", type=int, default=2200, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=6, help="packed rows in a step")
    parser.add_argument("--row-length", type=int, default=384, help="tokens in a row")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--vocab-size", type=int, default=2048, help="most tokens to learn")
    parser.add_argument("--hidden-size", type=int, default=256, help="width of the model")
    parser.add_argument("--intermediate-size", type=int, default=704, help="width of the MLP")
    parser.add_argument("--layers", type=int, default=5, help="number of decoder layers")
    parser.add_argument("--seed", type=int, default=0, help="seed of the text and of the first weights")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Runs `python -m demo.train`."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    corpus = Corpus(args.seed)
    tokenizer = train_tokenizer(islice(corpus.documents(), TOKENIZER_DOCUMENTS), args.vocab_size)
    model = LlamaForCausalLM(make_config(args, tokenizer))
    size = sum(p.numel() for p in model.parameters())
    print(f"vocabulary {tokenizer.get_vocab_size()}, {size:,} parameters", flush=True)
    train(model, (encode(tokenizer, document) for document in corpus.documents()), args)
    save(model, tokenizer, args.output)
    print(f"saved {args.output}", flush=True)
    evaluate.report(args.output)


if __name__ == "__main__":
    main()
