"""What steps have cost: sums over prompt tokens, from which readers get rates, and a model of how long a step takes.

By the model the scheduler knows how many prompt tokens are cheap beside decodes. That differs by a factor of ten
between processors that read the same weights in the same time, and it changes with the cores that a node borrows.
"""

import math

from kvrelay.engine.plan import SchedulerOutput

UNNOTICED_SECONDS = 0.010  # what a step may take longer even if decoding alone takes less
MOST_TIMES_LONGER = 4  # how many times the time of decoding alone a step may take longer, however many prompts wait
MIXED_STEPS = 16  # in a row, after which one is to decode only
_FIRST_STEP_IN_TOKENS = 32  # at first: how many tokens take as long as the part of a step that each step has
_WEIGHT = 1 / 4  # of the newest step: how much of the factor by which it was mispredicted is corrected
_TOKEN_WEIGHT = 8  # how many times as fast what a prompt's token costs is learned: steps with prompts are fewer
_MOST_WRONG = 2.0  # by what factor a step can have been mispredicted: beyond that, something else held it up


class StepCosts:
    """The costs of one engine's steps. `num_prompt_tokens` and `prompt_seconds` are sums since its start: the tokens,
    and the time of all steps that computed some. `newest_decode` is how many seconds the newest step took, 0 if prompts
    were computed or put off.

    The model: a step takes `_step` seconds, which above all read the weights, `_decode` for each sequence that decodes,
    and `_prompt_token` for each token of a prompt. Each step corrects all three, by the factor that the prediction was
    wrong and in the proportion that each had in it: an exponentiated gradient step (Kivinen and Warmuth, 1997), which
    keeps them positive, with the rate normalised as in normalised least mean squares."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.prompt_seconds = 0.0
        self.newest_decode = 0.0
        self._num_mixed_steps = 0  # since the newest that did only one of the two
        self._step = self._decode = self._prompt_token = 0.0  # 0 before the first step

    def count(self, plan: SchedulerOutput, seconds: float) -> None:
        """Adds a step that took `seconds`. In the sums, a step that also decodes counts in full, because its prompt
        tokens took that long."""
        counts = [entry.num_scheduled_tokens for entry in plan.scheduled]
        num_decodes, num_tokens = counts.count(1), sum(count for count in counts if count > 1)
        self.newest_decode = 0.0 if num_tokens or self.need_decode_step() else seconds
        self._num_mixed_steps = self._num_mixed_steps + 1 if num_decodes and num_tokens else 0
        if num_tokens:
            self.num_prompt_tokens += num_tokens
            self.prompt_seconds += seconds
        if seconds > 0.0:
            self._correct(num_decodes, num_tokens, seconds)

    def prompt_tokens_within(self, seconds: float) -> float:
        """Returns how many prompt tokens take so long, at the rate of all so far; infinitely many before the first."""
        return seconds * self.num_prompt_tokens / self.prompt_seconds if self.prompt_seconds else math.inf

    def need_decode_step(self) -> bool:
        """Tells whether the next step is to decode only, though prompts wait. Where they always do, steps may all be
        alike, with as few tokens of prompts as seem to be cheap. They do not show what a token costs, and if that was
        overestimated, it would stay so."""
        return self._num_mixed_steps >= MIXED_STEPS

    def num_cheap_tokens(self, num_decodes: int, num_queued: int, *, on_borrowed_cores: bool = False) -> int:
        """Returns how many tokens of a prompt are cheap in a step with `num_decodes` decodes, 1 or more, while
        `num_queued` other prompts wait behind it; 0 before the first step.

        They make the step half as long again as decoding alone, or `UNNOTICED_SECONDS` longer. On borrowed cores it may
        take twice as long, which is about what it takes without them. If more than a quarter as many prompts are queued
        as sequences decode, it may take longer in proportion: otherwise few sequences would decode, each paying for a
        larger part of reading the weights, and all others would wait for their turn."""
        if not self._prompt_token:
            return 0
        decoding = self._step + self._decode * num_decodes
        times = max(1.0 if on_borrowed_cores else 0.5, min(MOST_TIMES_LONGER, 2 * num_queued / num_decodes))
        return int(max(decoding * times, UNNOTICED_SECONDS) / self._prompt_token)

    def _correct(self, num_decodes: int, num_tokens: int, seconds: float) -> None:
        """Corrects the model by a step that took `seconds`."""
        if not self._prompt_token:
            token = seconds / (_FIRST_STEP_IN_TOKENS + num_decodes + num_tokens)
            self._step, self._decode, self._prompt_token = _FIRST_STEP_IN_TOKENS * token, token, token
            return
        parts = self._step, self._decode * num_decodes, self._prompt_token * num_tokens
        predicted = sum(parts)
        wrong = min(_MOST_WRONG, max(1 / _MOST_WRONG, seconds / predicted))
        weighted = parts[0], parts[1], parts[2] * _TOKEN_WEIGHT
        total = sum(part * weight for part, weight in zip(parts, weighted, strict=True))
        correction = _WEIGHT * math.log(wrong) * predicted / total
        self._step *= math.exp(correction * weighted[0])
        self._decode *= math.exp(correction * weighted[1])
        self._prompt_token *= math.exp(correction * weighted[2])
