"""Judges whether a client got what it would have got from an undisturbed cluster."""

from collections.abc import Mapping, Sequence
from enum import Enum

from tests.chaos.streams import Answer

_WINDOW = 12  # tokens or characters that identify a place in a stream
_LOGPROB_TOLERANCE = 2e-3


class Verdict(Enum):
    RIGHT = "right"
    FAILED = "failed"
    DIFFERENT = "different"
    SHIFTED = "duplicate or gap"


def judge(found: Answer, expected: Answer) -> tuple[Verdict, str]:
    """Returns the verdict and its reason. A client that has left must have seen the beginning of what was expected."""
    if found.error:
        return Verdict.FAILED, found.error
    for index, output in found.outputs.items():
        whole = expected.outputs[index]
        if output != whole[: len(output)]:
            return _difference(index, output, whole)
        if not _close(found.logprobs.get(index, []), expected.logprobs.get(index, [])):
            return Verdict.DIFFERENT, f"output {index}: other logprobs"
        if len(found.logprobs.get(index, [])) != (len(output) if expected.logprobs else 0):
            return Verdict.SHIFTED, f"output {index}: not one logprob for each token"
    if not found.left and (found.outputs, found.finish_reasons) != (expected.outputs, expected.finish_reasons):
        return Verdict.SHIFTED, f"ended early: {found.finish_reasons}, not {expected.finish_reasons}"
    return Verdict.RIGHT, ""


def differences(found: Mapping[str, Answer], expected: Mapping[str, Answer]) -> list[str]:
    """Returns which of the answers are not right, and why."""
    verdicts = {name: judge(answer, expected[name]) for name, answer in found.items()}
    return [f"{name} is {verdict.value}: {why}" for name, (verdict, why) in verdicts.items() if why]


def _difference(index: int, output: Sequence[object], whole: Sequence[object]) -> tuple[Verdict, str]:
    place = next((i for i, (one, other) in enumerate(zip(output, whole, strict=False)) if one != other), len(whole))
    after = output[place : place + _WINDOW]
    what = f"output {index} at {place}: {after!r}, not {whole[place : place + _WINDOW]!r}"
    places = range(len(whole) - len(after) + 1)
    is_shift = len(after) == _WINDOW and any(whole[i : i + _WINDOW] == after for i in places)
    return (Verdict.SHIFTED if is_shift or place == len(whole) else Verdict.DIFFERENT), what


def _close(found: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = zip(found, expected, strict=False)
    return len(found) <= len(expected) and all(abs(one - other) < _LOGPROB_TOLERANCE for one, other in pairs)
