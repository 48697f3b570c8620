"""Asks the demo model the questions of questions.json, greedily, and counts the right answers.

Invariant: the model and tokenizer are loaded through transformers, as any other checkpoint is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE: Final = Path(__file__).parent
MAX_NEW_TOKENS: Final = 40


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, how it is put, and what the answer must contain."""

    kind: Literal["chat", "completion"]
    prompt: str
    expected: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model wrote, whether it ended by itself, and its least certain step (logit gap of best to second)."""

    question: Question
    text: str
    token_ids: tuple[int, ...]
    ended: bool
    margin: float

    @property
    def right(self) -> bool:
        return self.question.expected in self.text


def load_questions() -> tuple[Question, ...]:
    """Reads the committed list of questions."""
    return tuple(Question(**entry) for entry in json.loads((HERE / "questions.json").read_text(encoding="utf-8")))


class Examiner:
    """One loaded model that answers greedily."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir))
        self._model: Any = AutoModelForCausalLM.from_pretrained(str(model_dir), dtype=dtype)
        self._model.train(False)

    def prompt_token_ids(self, question: Question) -> list[int]:
        """Returns the prompt's tokens: a chat question goes through the chat template, a completion gets a begin
        token."""
        if question.kind == "completion":
            return list(self._tokenizer(question.prompt)["input_ids"])
        messages = [{"role": "user", "content": question.prompt}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def ask(self, question: Question, max_new_tokens: int = MAX_NEW_TOKENS) -> Reply:
        """Returns a greedy answer of at most `max_new_tokens` tokens."""
        prompt = torch.tensor([self.prompt_token_ids(question)])  # [1, num_prompt_tokens]
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        token_ids: list[int] = output.sequences[0, prompt.shape[1] :].tolist()
        best_two = torch.cat(output.logits).float().topk(2).values  # [num_output_tokens, 2]
        return Reply(
            question,
            self._tokenizer.decode(token_ids, skip_special_tokens=True),
            tuple(token_ids),
            ended=len(token_ids) < max_new_tokens,
            margin=float((best_two[:, 0] - best_two[:, 1]).min()),
        )

    def ask_all(self, questions: Sequence[Question]) -> list[Reply]:
        """Returns the replies in the order of the questions."""
        return [self.ask(question) for question in questions]


def accuracy(replies: Sequence[Reply]) -> float:
    """Returns the share of right replies, between 0 and 1."""
    return sum(reply.right for reply in replies) / len(replies)


def report(model_dir: Path) -> None:
    """Prints accuracy in float32 and bfloat16, how often both give the same tokens, and every wrong answer."""
    questions = load_questions()
    full = Examiner(model_dir, torch.float32).ask_all(questions)
    half = Examiner(model_dir, torch.bfloat16).ask_all(questions)
    for name, replies in (("float32", full), ("bfloat16", half)):
        print(f"{name}: {accuracy(replies):.1%} of {len(questions)} questions right", flush=True)
        for reply in replies:
            if not reply.right:
                print(f"  wrong: {reply.question.prompt!r} -> {reply.text!r}, expected {reply.question.expected!r}")
    same = sum(a.token_ids == b.token_ids for a, b in zip(full, half, strict=True))
    print(f"same tokens in both: {same} of {len(questions)}")
    print(f"smallest margin in float32: {min(r.margin for r in full):.3f}; ended: {sum(r.ended for r in full)}")


def main() -> None:
    """Runs `python -m demo.evaluate [MODEL_DIR]`."""
    parser = argparse.ArgumentParser(prog="python -m demo.evaluate", description=__doc__)
    parser.add_argument(
        "model_dir", nargs="?", type=Path, default=HERE / "model", help="a Hugging Face model directory"
    )
    report(parser.parse_args().model_dir)


if __name__ == "__main__":
    main()
