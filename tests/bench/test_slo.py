"""Which requests meet their service level objectives."""

import pytest

from kvrelay.bench.base import Failure
from kvrelay.bench.slo import Slos
from tests.bench.records import record


@pytest.mark.parametrize(
    ("met", "missed"),
    [
        ("ttft=1000", "ttft=999"),
        ("tpot=600", "tpot=400"),
        ("itl=750", "itl=700"),
        ("e2e=2000", "e2e=1999"),
    ],
)
def test_each_metric_has_a_limit_of_its_own(met: str, missed: str) -> None:
    request = record(1.0, 1.25, 2.0)
    for text, expected in ((met, True), (missed, False)):
        slos = Slos.parse([text])
        assert slos is not None
        assert slos.met_by(request) is expected


def test_every_limit_has_to_be_met() -> None:
    slos = Slos.parse(["ttft=1000", "e2e=1999"])
    assert slos is not None
    assert slos.met_by(record(1.0, 1.5))
    assert not slos.met_by(record(1.0, 2.0))
    assert not slos.met_by(record(1.5, 1.75))


def test_a_request_of_one_token_has_no_gap_that_could_be_too_long() -> None:
    slos = Slos.parse(["itl=1", "tpot=1"])
    assert slos is not None
    assert slos.met_by(record(1.0))
    assert not slos.met_by(record(1.0, failure=Failure("timeout", "late")))
