"""A runner that takes its time, on a clock that tests move."""

from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.runner import LaunchedStep, Runner
from tests.manual_clock import ManualClock


class TimedRunner:
    """A runner whose steps take the time that they would take on some machine: `decode` seconds, `each_decode` for each
    sequence that decodes, and `prompt_token` for each token of a prompt."""

    def __init__(
        self,
        runner: Runner,
        clock: ManualClock,
        *,
        decode: float,
        each_decode: float = 0.0,
        prompt_token: float = 0.0,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._decode = decode
        self._each_decode = each_decode
        self._prompt_token = prompt_token

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        counts = [entry.num_scheduled_tokens for entry in plan.scheduled]
        num_tokens = sum(count for count in counts if count > 1)
        self._clock.seconds += self._decode + self._each_decode * counts.count(1) + self._prompt_token * num_tokens
        return self._runner.launch(plan)
