"""Absences are remembered for a moment, and only a bounded number of them."""

from kvrelay.core.kv.block_hash import BlockHash
from kvrelay.core.kv.source import KVSource
from kvrelay.node.absences import Absences

A, B = KVSource("a", 1, "at-a"), KVSource("b", 1, "at-b")
ONE, TWO, THREE = (BlockHash(bytes([index]) * 32) for index in (1, 2, 3))


def test_an_absence_holds_for_one_holder_and_one_block_for_a_moment() -> None:
    now = 100.0
    absences = Absences(lambda: now)
    absences.note(A, [ONE])
    assert absences.has(A, ONE)
    assert not absences.has(A, TWO) and not absences.has(B, ONE)
    assert not absences.has(KVSource("a", 2, "at-a"), ONE), "it has started again since"
    now += 1.9
    absences.note(A, [TWO])
    now += 0.2
    assert not absences.has(A, ONE) and absences.has(A, TWO)


def test_the_oldest_absences_are_forgotten_first() -> None:
    absences = Absences(lambda: 0.0, capacity=2)
    absences.note(A, [ONE, TWO])
    absences.note(A, [ONE])
    absences.note(A, [THREE])
    assert [absences.has(A, name) for name in (ONE, TWO, THREE)] == [True, False, True]
