"""`kvrelay serve` with the demo model, and what transformers computes with that model."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.demo_model import DEMO_MODEL
from tests.e2e.client import Router, router_at, wait_idle
from tests.e2e.processes import Program, processes_of, program, segments_of, wait_until_gone
from tests.engine.reference import Reference

BLOCK_SIZE = 16
FREE_PORTS = ("--port", "0", "--grpc-port", "0")
SMALL = ("--dtype", "float32", "--num-blocks", "512")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running `kvrelay serve`."""

    router: Router
    grpc_address: str
    program: Program
    model: Path

    def kill(self, name: str) -> None:
        """Kills a process with SIGKILL; `kvrelay serve` starts it again."""
        os.kill(self._process(name), signal.SIGKILL)

    def stop_node(self, name: str) -> None:
        """Stops a node with SIGSTOP: its connections stay open, and it sends nothing until `continue_node`."""
        os.kill(self._process(name), signal.SIGSTOP)

    def continue_node(self, name: str) -> None:
        os.kill(self._process(name), signal.SIGCONT)

    def _process(self, name: str) -> int:
        [process] = [number for number, arguments in processes_of(self.model).items() if name in arguments]
        return process

    def node_address(self, name: str) -> str:
        found = re.search(rf"{name} is ready on (\S+)", self.program.log.read_text())
        assert found is not None
        return found[1]

    def wait_idle(self) -> None:
        """Returns when all nodes are idle."""
        for name in set(re.findall(r"(\S+) is ready on", self.program.log.read_text())):
            wait_idle(self.node_address(name))


class Oracle:
    """The demo model in transformers, whose tokens and log-probabilities ours have to equal."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
        self._reference = Reference(DEMO_MODEL)

    def tokens(self, prompt: str | list[int], max_tokens: int) -> list[int]:
        return self._reference.generate(self.encode(prompt) if isinstance(prompt, str) else prompt, max_tokens)

    def choices(self, prompt: list[int], output: list[int]) -> list[int]:
        """Returns its greedy token after the prompt and each beginning of `output`, which are `output` if that is
        greedy. It takes one step for all of them, and not one for each."""
        choices: list[int] = self._reference.logits(prompt + output)[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        return choices

    def text(self, prompt: str | list[int], max_tokens: int) -> str:
        text: str = self.tokenizer.decode(self.tokens(prompt, max_tokens), skip_special_tokens=True)
        return text

    def logprobs(self, prompt: str, max_tokens: int) -> list[float]:
        """Returns the log-probabilities of the greedy output's tokens."""
        prompt_token_ids = self.encode(prompt)
        token_ids = prompt_token_ids + self.tokens(prompt, max_tokens)
        logprobs = self._reference.logprobs(token_ids)
        return [
            float(logprobs[position - 1, token_ids[position]])
            for position in range(len(prompt_token_ids), len(token_ids))
        ]

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer(text)["input_ids"]
        return token_ids


def some_token_ids(num_tokens: int, seed: int) -> list[int]:
    """Returns token ids that depend only on the arguments, none of them special."""
    return [16 + (seed * 7919 + position * position * 31 + position) % 2000 for position in range(num_tokens)]


def link_model(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / "demo-model"
    path.symlink_to(DEMO_MODEL)
    return path


@contextmanager
def served(model: Path, *arguments: str, directory: Path) -> Iterator[Cluster]:
    """Runs `kvrelay serve MODEL ARGUMENTS` during the context, with a log beside the model. At the end the cluster must
    be idle, is ended by Ctrl-C, and must leave nothing. Nothing is left either if the test has failed."""
    command = ("serve", str(model), *FREE_PORTS, "--json-ready", *arguments)
    log = model.with_suffix(".log")
    try:
        with program(*command, log=log, directory=directory) as running:
            ready = running.wait_ready()
            with router_at(ready) as router:
                cluster = Cluster(router, ready["grpc_address"], running, model)
                yield cluster
                if running.process.poll() is not None:
                    return
                cluster.wait_idle()
            segments = segments_of(model)
            assert running.interrupt() == 0, log.read_text()
            assert processes_of(model) == {}
            assert [path for path in segments if path.exists()] == []
    finally:
        for process in processes_of(model):  # a test that failed may have stopped it: it would stay for ever
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        wait_until_gone(model)
