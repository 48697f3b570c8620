"""A runner that takes its time, on a clock that tests move."""

from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.runner import LaunchedStep, Runner
from tests.manual_clock import ManualClock


class TimedRunner:
    """A runner whose steps take the time that they would take on some machine."""

    def __init__(self, runner: Runner, clock: ManualClock, *, decode: float, prompt_token: float = 0.0) -> None:
        self._runner = runner
        self._clock = clock
        self._decode = decode
        self._prompt_token = prompt_token

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        counts = [entry.num_scheduled_tokens for entry in plan.scheduled]
        self._clock.seconds += self._decode + self._prompt_token * sum(count for count in counts if count > 1)
        return self._runner.launch(plan)
