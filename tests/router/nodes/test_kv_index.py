"""The index compared with a naive model of it, its bound, and the cost of a lookup."""

import random
from collections.abc import Callable, Sequence

import pytest

from kvrelay.core.kv.block_hash import BlockHash
from router.nodes import kv_index
from router.nodes.kv_index import KVIndex


def names(*numbers: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(32, "little")) for number in numbers]


def naive_leading(holdings: dict[str, set[BlockHash]], hashes: list[BlockHash]) -> dict[str, int]:
    counts = {}
    for node_id, held in holdings.items():
        count = next((index for index, name in enumerate(hashes) if name not in held), len(hashes))
        if count:
            counts[node_id] = count
    return counts


def test_leading_counts_stop_at_the_first_gap() -> None:
    index = KVIndex(100)
    index.stored("a", names(1, 2, 3))
    index.stored("b", names(1, 3))
    index.stored("c", names(2, 3))
    assert index.leading(names(1, 2, 3, 4)) == {"a": 3, "b": 1}
    assert index.leading(names(1, 2, 3)) == {"a": 3, "b": 1}
    assert index.leading(names(4)) == {}
    assert index.leading([]) == {}


def test_names_behind_the_first_miss_are_not_taken() -> None:
    index = KVIndex(100)
    index.stored("a", names(1, 3))
    asked = iter(names(1, 2, 3))
    assert index.leading(asked) == {"a": 1}
    assert list(asked) == names(3)


def test_removing_and_dropping_leave_the_others() -> None:
    index = KVIndex(100)
    index.stored("a", names(1, 2))
    index.stored("b", names(1, 2))
    index.removed("a", names(2, 7))
    index.removed("nobody", names(1))
    assert index.leading(names(1, 2)) == {"a": 1, "b": 2}
    index.drop("b")
    index.drop("b")
    assert index.leading(names(1, 2)) == {"a": 1}
    assert len(index) == 1
    index.stored("c", names(1))
    assert index.leading(names(1, 2)) == {"a": 1, "c": 1}
    index.check_integrity()


def test_a_dropped_node_is_forgotten_at_once_and_swept_by_and_by() -> None:
    """There are more names than one call sweeps. A node that comes meanwhile must not get the bit of the dropped
    one."""
    chain = names(*range(1, 2001))
    index = KVIndex(10_000)
    index.stored("a", chain)
    index.stored("b", chain[:10])
    index.drop("a")
    assert index.leading(chain) == {"b": 10}
    index.stored("c", chain[:5])
    index.stored("a", chain[:3])
    assert index.leading(chain) == {"a": 3, "b": 10, "c": 5}
    assert len(index) > 10
    for _ in range(10):
        index.drop("b")
        index.stored("b", chain[:10])
        index.check_integrity()
        assert index.leading(chain) == {"a": 3, "b": 10, "c": 5}
    for _ in range(10):
        index.removed("nobody", [])
    assert len(index) == 10
    index.check_integrity()
    for _ in range(100):  # restarts
        index.drop("b")
        index.stored("b", chain[:10])
    assert max(index._bits.values()) < 1 << 8, "bits are used again"


@pytest.mark.parametrize("report", [KVIndex.stored, KVIndex.removed])
def test_a_dropped_node_is_swept_whatever_the_others_report(
    report: Callable[[KVIndex, str, Sequence[BlockHash]], None],
) -> None:
    index = KVIndex(10_000)
    index.stored("dropped", names(*range(2000)))
    index.drop("dropped")
    for _ in range(4):
        report(index, "another", [])
    assert len(index) == 0


def test_the_bound_holds_and_the_oldest_go_first() -> None:
    index = KVIndex(3)
    index.stored("a", names(1))
    index.stored("a", names(2))
    index.stored("a", names(3))
    assert index.leading(names(1)) == {"a": 1}  # used just now
    index.stored("a", names(4))
    assert len(index) == 3
    assert index.leading(names(2)) == {}
    assert index.leading(names(1)) == {"a": 1}


@pytest.mark.usefixtures("num_swept_per_call")
def test_a_sweep_does_not_change_which_names_are_the_oldest() -> None:
    index = KVIndex(5)
    for number in (1, 2, 3, 4):
        index.stored("a", names(number))
    index.stored("dropped", names(1))  # not the oldest any more
    index.drop("dropped")
    index.leading(names(2))
    index.stored("a", names(5, 6))
    assert [index.leading(names(number)) for number in range(1, 7)] == [
        {"a": 1},
        {"a": 1},
        {},
        {"a": 1},
        {"a": 1},
        {"a": 1},
    ]


def test_a_name_that_is_stored_again_is_not_the_oldest_any_more() -> None:
    index = KVIndex(3)
    for number in (1, 2, 3, 1, 4):
        index.stored("a", names(number))
    assert index.leading(names(1)) == {"a": 1}
    assert index.leading(names(2)) == {}


def test_of_a_chain_that_was_looked_up_the_end_goes_first() -> None:
    index = KVIndex(3)
    index.stored("a", names(1, 2, 3))
    index.leading(names(1, 2, 3))
    index.stored("a", names(4))
    assert index.leading(names(1, 2, 3)) == {"a": 2}


def test_of_a_chain_that_is_too_long_the_beginning_stays() -> None:
    index = KVIndex(10)
    chain = names(*range(1, 31))
    index.stored("a", chain)
    assert index.leading(chain) == {"a": 10}


@pytest.fixture(params=[1, 3, 512])
def num_swept_per_call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a sweep take one call or many, during which other nodes are dropped."""
    monkeypatch.setattr(kv_index, "_SWEPT_PER_CALL", request.param)


@pytest.mark.usefixtures("num_swept_per_call")
@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_events_agrees_with_the_model(seed: int) -> None:
    rng = random.Random(seed)
    index = KVIndex(10_000)
    holdings: dict[str, set[BlockHash]] = {f"node-{number}": set() for number in range(5)}
    for _ in range(2000):
        node_id = rng.choice(list(holdings))
        chosen = names(*(rng.randrange(1, 12) for _ in range(rng.randrange(6))))
        action = rng.random()
        if action < 0.45:
            index.stored(node_id, chosen)
            holdings[node_id].update(chosen)
        elif action < 0.8:
            index.removed(node_id, chosen)
            holdings[node_id].difference_update(chosen)
        elif action < 0.82:
            index.drop(node_id)
            holdings[node_id].clear()
        else:
            asked = names(*range(1, rng.randrange(2, 14)))
            assert index.leading(asked) == naive_leading(holdings, asked)
        index.check_integrity()


@pytest.mark.usefixtures("num_swept_per_call")
@pytest.mark.parametrize("seed", range(3))
def test_a_small_index_never_claims_what_is_not_held(seed: int) -> None:
    rng = random.Random(seed)
    index = KVIndex(6)
    holdings: dict[str, set[BlockHash]] = {"a": set(), "b": set()}
    for _ in range(1000):
        node_id = rng.choice(["a", "b"])
        chosen = names(*(rng.randrange(1, 20) for _ in range(3)))
        action = rng.random()
        if action < 0.6:
            index.stored(node_id, chosen)
            holdings[node_id].update(chosen)
        elif action < 0.65:
            index.drop(node_id)
            holdings[node_id].clear()
        else:
            index.removed(node_id, chosen)
            holdings[node_id].difference_update(chosen)
        index.check_integrity()
        asked = names(*range(1, 20))
        truth = naive_leading(holdings, asked)
        assert all(count <= truth.get(node_id, 0) for node_id, count in index.leading(asked).items())


def test_a_long_prompt_costs_a_few_dictionary_accesses_per_name() -> None:
    """The number of accesses does not depend on how many nodes hold the prompt."""
    chain = [_CountedName(name) for name in names(*range(8000))]
    index = KVIndex(20_000)
    for number in range(16):
        index.stored(f"node-{number}", [BlockHash(name) for name in chain[: 500 * (number + 1)]])
    _CountedName.num_hashed = 0
    assert index.leading([BlockHash(name) for name in chain])["node-15"] == 8000
    assert _CountedName.num_hashed <= 4 * len(chain)


class _CountedName(bytes):
    """A name that counts how often dictionaries access it."""

    num_hashed = 0

    def __hash__(self) -> int:
        _CountedName.num_hashed += 1
        return super().__hash__()
