"""Digests of prompts, and several blocks of one content."""

from contextlib import suppress
from copy import deepcopy

import pytest

from segattn.scheduler.prefix_cache import PrefixCache, PrefixHasher, pack_tokens
from segattn.scheduler.transaction import Transaction

DIGEST, OTHER = b"d" * 32, b"e" * 32


class TakenBackError(Exception):
    """Ends a transaction that is to be taken back."""


def filled() -> tuple[PrefixCache, Transaction]:
    """Blocks 1 to 4 hold the same content, block 5 another."""
    transaction = Transaction()
    cache = PrefixCache(8, transaction)
    with transaction:
        for block in (1, 2, 3, 4):
            cache.insert([block], [DIGEST])
        cache.insert([5], [OTHER])
    return cache, transaction


@pytest.mark.parametrize(
    ("evicted", "left"),
    [
        ([1], [2, 3, 4]),
        ([3], [1, 2, 4]),
        ([4], [1, 2, 3]),
        ([2, 1], [3, 4]),
        ([4, 3, 2], [1]),
        ([1, 2, 3, 4], []),
    ],
)
def test_eviction_keeps_the_order_of_the_others(evicted: list[int], left: list[int]) -> None:
    cache, transaction = filled()
    with suppress(TakenBackError), transaction:
        cache.evict(evicted)
        assert cache.blocks_of(DIGEST) == left
        assert cache.find_longest_hit([DIGEST], 1) == left[:1]
        assert [cache.block_hash[block] for block in evicted] == [None] * len(evicted)
        raise TakenBackError
    assert cache.blocks_of(DIGEST) == [1, 2, 3, 4]
    assert [cache.block_hash[block] for block in range(8)] == [
        None,
        *[DIGEST] * 4,
        OTHER,
        None,
        None,
    ]
    with transaction:
        cache.evict([2, 1])
    assert cache.blocks_of(DIGEST) == [3, 4]


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_an_insertion_that_is_taken_back_leaves_the_blocks_before_it(kept: int) -> None:
    transaction = Transaction()
    cache = PrefixCache(8, transaction)
    with transaction:
        for block in range(1, 1 + kept):
            cache.insert([block], [DIGEST])
    with suppress(TakenBackError), transaction:
        cache.insert([6, 7], [DIGEST, OTHER])
        assert cache.blocks_of(DIGEST) == [*range(1, 1 + kept), 6]
        raise TakenBackError
    assert cache.blocks_of(DIGEST) == [*range(1, 1 + kept)]
    assert cache.blocks_of(OTHER) == []
    assert cache.block_hash == [None, *[DIGEST] * kept, *[None] * (7 - kept)]
    with transaction:
        cache.insert([7], [DIGEST])
    assert cache.blocks_of(DIGEST) == [*range(1, 1 + kept), 7]


def test_a_block_that_is_not_cached_cannot_be_evicted() -> None:
    cache, _ = filled()
    with pytest.raises(ValueError, match="block=6 is not cached"):
        cache.evict([6])
    assert cache.digests() == [DIGEST, OTHER]


def test_clearing_forgets_every_block_of_a_content() -> None:
    cache, transaction = filled()
    cache.clear()
    assert cache.block_hash == [None] * 8
    with transaction:
        cache.insert([6], [DIGEST])
    assert cache.blocks_of(DIGEST) == [6]


def test_a_copied_hasher_goes_on_by_itself() -> None:
    hasher = PrefixHasher(2, "salt")
    hasher.digests(pack_tokens([1, 2]))
    copied = deepcopy(hasher)
    expected = hasher.digests(pack_tokens([3, 4]))
    assert copied.digests(pack_tokens([3, 4])) == expected != hasher.digests(pack_tokens([3, 4]))
