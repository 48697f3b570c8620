"""What prompts have in common with those that a node is to compute."""

import pytest

from kvrelay.core.kv.block_hash import BlockHash
from router.nodes.coming_prompts import STRIDE, ComingPrompts, beginnings

ROOT = BlockHash(b"r" * 32)
LONG = tuple(range(3 * STRIDE + 7))


@pytest.mark.parametrize("num_tokens", [0, STRIDE - 1, STRIDE, STRIDE + 1, 2 * STRIDE, 3 * STRIDE + 7])
def test_prompts_with_the_same_first_tokens_have_the_same_beginnings(num_tokens: int) -> None:
    other = (*LONG[:num_tokens], *range(9000, 9000 + STRIDE))
    same = num_tokens // STRIDE
    assert beginnings(ROOT, LONG)[:same] == beginnings(ROOT, other)[:same]
    assert not set(beginnings(ROOT, LONG)[same:]) & set(beginnings(ROOT, other)[same:])


def test_a_beginning_is_that_of_its_root_alone() -> None:
    assert not set(beginnings(ROOT, LONG)) & set(beginnings(BlockHash(b"s" * 32), LONG))


def test_the_tokens_that_a_prompt_shares_with_one_that_is_to_be_computed_are_counted() -> None:
    coming = ComingPrompts()
    coming.begin(beginnings(ROOT, LONG))
    for num_tokens, expected in ((len(LONG), 3), (3 * STRIDE - 1, 2), (STRIDE, 1), (STRIDE - 1, 0)):
        assert coming.num_common_tokens(beginnings(ROOT, LONG[:num_tokens])) == expected * STRIDE
    assert coming.num_common_tokens(beginnings(ROOT, (1, *LONG))) == 0


def test_a_beginning_is_coming_until_the_last_prompt_that_has_it_is_computed() -> None:
    coming = ComingPrompts()
    short, long = beginnings(ROOT, LONG[:STRIDE]), beginnings(ROOT, LONG)
    coming.begin(long)
    coming.begin(short)
    coming.end(long)
    assert coming.num_common_tokens(long) == STRIDE
    coming.end(short)
    assert coming.num_common_tokens(long) == len(coming) == 0
