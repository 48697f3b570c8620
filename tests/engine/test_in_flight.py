"""A step that cannot be launched leaves no block pinned, and the step before it as good as it was."""

import pytest

from kvrelay.core.errors import KVRelayError
from kvrelay.core.generation.outputs import FinishReason
from kvrelay.engine.plan import SchedulerOutput
from kvrelay.engine.runner import LaunchedStep, Runner
from tests.engine.fake_runner import expected_output
from tests.engine.harness import Harness, prompt_of, request


class InterruptedRunner:
    """A runner whose first step with copies an interrupt ends before it runs."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._interrupted = False

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        if plan.copies and not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt
        return self._inner.launch(plan)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_an_interrupt_leaves_no_block_pinned(run_ahead: bool) -> None:
    """Copy-on-write has pinned blocks for the step, and with `run_ahead` another step is in flight."""
    harness = Harness(run_ahead=run_ahead, wrap=InterruptedRunner)
    harness.engine.add(request("parallel", prompt_of(21), n=4))
    harness.engine.add(request("single", prompt_of(5, 1), 30))
    with pytest.raises(KeyboardInterrupt):
        harness.run()
    assert harness.engine.has_steps_in_flight == run_ahead
    harness.engine.abort("parallel")
    harness.engine.abort("single")
    harness.engine.check_idle()
    harness.engine.add(request("again", prompt_of(21), n=4))
    harness.run()
    expected = [expected_output(prompt_of(21), 8, choice_index=index) for index in range(4)]
    assert [harness.tokens["again", index] for index in range(4)] == expected
    harness.engine.check_idle()


def test_an_output_that_ends_in_the_step_before_one_that_fails_has_ended_well() -> None:
    launches: list[SchedulerOutput] = []

    class FailingAtSecond:
        def __init__(self, inner: Runner) -> None:
            self._inner = inner

        def launch(self, plan: SchedulerOutput) -> LaunchedStep:
            launches.append(plan)
            if len(launches) == 2:
                raise KVRelayError("launched")
            return self._inner.launch(plan)

    prompt = prompt_of(5)
    harness = Harness(eos=expected_output(prompt, 1), run_ahead=True, wrap=FailingAtSecond)
    harness.engine.add(request("a", prompt, 8))
    harness.run()
    assert harness.finished == {("a", 0): FinishReason.STOP}
    assert len(launches) == 2 and not any(result.failures for result in harness.results)
    harness.engine.check_idle()
