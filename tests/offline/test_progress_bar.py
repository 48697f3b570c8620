"""A progress bar that cannot be drawn costs nothing: neither results nor what the engine holds."""

import sys
from io import StringIO

import pytest

from kvrelay import LLM, SamplingParams
from tests.demo_model import DEMO_MODEL

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(DEMO_MODEL, dtype="float32", threads=1, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=32)


class Pipe(StringIO):
    """A pipe that nobody reads any more after its first texts."""

    num_texts = 0

    def write(self, text: str) -> int:
        self.num_texts += 1
        if self.num_texts > 2:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


@pytest.mark.parametrize("stream", [Pipe(), None])
def test_a_bar_that_can_not_be_drawn_ends_no_batch(
    llm: LLM, stream: StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(["A week has"] * 12, GREEDY, progress=False)
    monkeypatch.setattr(sys, "stderr", stream)
    found = llm.generate(["A week has"] * 12, GREEDY)
    assert [one.outputs for one in found] == [one.outputs for one in expected]
    assert not isinstance(stream, Pipe) or stream.num_texts > 2
    llm._engine.check_idle()


def test_what_an_interrupted_batch_holds_is_given_back_though_its_bar_fails(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stderr", Pipe())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm._engine, "step", interrupted)
        llm.generate(["A week has"] * 12, GREEDY)
    llm._engine.check_idle()
