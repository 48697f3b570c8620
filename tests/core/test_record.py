"""Records: values to type checkers, plain objects with slots at run time."""

from kvrelay.core.record import record


@record
class Point:
    x: int
    y: int = 0


def test_only_type_checkers_refuse_to_set_a_field() -> None:
    point = Point(1)
    point.y = 2  # type: ignore[misc]  # mypy reports an ignore that it does not need
    assert point == Point(1, 2)
    assert not hasattr(point, "__dict__")


def test_equal_records_are_one_in_a_set() -> None:
    assert {Point(1), Point(1, 0), Point(2)} == {Point(1), Point(2)}
