"""Which blocks are found for a prefix: several of one content, and blocks not hashed yet."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

import pytest

from segattn.scheduler.prefix_cache import PrefixCache
from segattn.scheduler.prefix_digests import PrefixDigests, pack_tokens
from segattn.scheduler.transaction import Transaction
from segattn.tests.scheduler.base import add, make, update
from segattn.tests.scheduler.state import state_of
from segattn.tests.scheduler.test_atomicity import InjectedError
from segattn.tests.scheduler.test_atomicity_of_lines import call_with_failing_line


def prefix(*tokens: int) -> PrefixDigests:
    """Blocks of two tokens."""
    return PrefixDigests(2, None, pack_tokens(tokens))


def hashed(*tokens: int) -> PrefixDigests:
    """The same, all of them hashed."""
    one = prefix(*tokens)
    one.set_digests(one.all_digests())
    return one


ONE, TWO = prefix(3, 4), prefix(5, 6)
DIGEST, OTHER = ONE.digests[0], TWO.digests[0]


class TakenBackError(Exception):
    """Ends a transaction that is to be taken back."""


def blocks_of(cache: PrefixCache, digest: bytes) -> list[int]:
    return cache.blocks_by_digest().get(digest, [])


def filled() -> tuple[PrefixCache, Transaction]:
    """Blocks 1 to 4 hold the same content, block 5 another."""
    transaction = Transaction()
    cache = PrefixCache(8, transaction)
    with transaction:
        for block in (1, 2, 3, 4):
            cache.insert([block], ONE, 0)
        cache.insert([5], TWO, 0)
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
        assert blocks_of(cache, DIGEST) == left
        assert cache.find_longest_hit(ONE, 1) == left[:1]
        assert [cache.block_hash[block] for block in evicted] == [None] * len(evicted)
        raise TakenBackError
    assert blocks_of(cache, DIGEST) == [1, 2, 3, 4]
    assert [cache.block_hash[block] for block in range(8)] == [
        None,
        *[DIGEST] * 4,
        OTHER,
        None,
        None,
    ]
    with transaction:
        cache.evict([2, 1])
    assert blocks_of(cache, DIGEST) == [3, 4]


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_an_insertion_that_is_taken_back_leaves_the_blocks_before_it(kept: int) -> None:
    both = hashed(3, 4, 7, 8)
    longer = both.digests[1]
    transaction = Transaction()
    cache = PrefixCache(8, transaction)
    with transaction:
        for block in range(1, 1 + kept):
            cache.insert([block], ONE, 0)
    with suppress(TakenBackError), transaction:
        cache.insert([6, 7], both, 0)
        assert blocks_of(cache, DIGEST) == [*range(1, 1 + kept), 6]
        raise TakenBackError
    assert blocks_of(cache, DIGEST) == [*range(1, 1 + kept)]
    assert blocks_of(cache, longer) == []
    assert cache.block_hash == [None, *[DIGEST] * kept, *[None] * (7 - kept)]
    with transaction:
        cache.insert([7], ONE, 0)
    assert blocks_of(cache, DIGEST) == [*range(1, 1 + kept), 7]


def test_a_block_that_is_not_cached_cannot_be_evicted() -> None:
    cache, _ = filled()
    with pytest.raises(ValueError, match="block=6 is not cached"):
        cache.evict([6])
    assert list(cache.blocks_by_digest()) == [DIGEST, OTHER]


def test_clearing_forgets_every_block_of_a_content() -> None:
    cache, transaction = filled()
    cache.clear()
    assert cache.block_hash == [None] * 8
    with transaction:
        cache.insert([6], ONE, 0)
    assert blocks_of(cache, DIGEST) == [6]


def test_blocks_are_unhashed_until_another_prefix_begins_alike() -> None:
    transaction = Transaction()
    cache = PrefixCache(9, transaction)
    one = prefix(3, 4, 5, 6, 7, 8)
    with transaction:
        cache.insert([1, 2], one, 0)
        cache.insert([3], one, 2)
        assert (one.digests, one.unhashed) == ([DIGEST], [2, 3])
        # Another beginning is not like it.
        assert cache.find_longest_hit(prefix(3, 5, 5, 6), 2) == []
        cache.insert([4], TWO, 0)
        assert one.unhashed == [2, 3]
        assert cache.find_longest_hit(prefix(3, 4, 5, 6, 8, 8), 3) == [1, 2]
    assert (one.digests, one.packed, one.unhashed) == (hashed(3, 4, 5, 6, 7, 8).digests, None, [])


def test_a_prefix_that_only_caches_finds_unhashed_blocks_too() -> None:
    transaction = Transaction()
    cache = PrefixCache(9, transaction)
    one, other = prefix(3, 4, 5, 6, 7, 8), prefix(3, 4, 5, 6)
    with transaction:
        cache.insert([1, 2], one, 0)
        cache.insert([3, 4], other, 0)
        assert (one.unhashed, other.unhashed) == ([], [4])
        cache.insert([5], one, 2)
        assert (one.unhashed, other.unhashed) == ([], [])
    assert [*cache.blocks_by_digest().values()] == [[1, 3], [2, 4], [5]]


def test_a_prefix_that_starts_again_is_found_behind_its_older_blocks() -> None:
    transaction = Transaction()
    cache = PrefixCache(9, transaction)
    one = prefix(3, 4, 5, 6)
    with transaction:
        cache.insert([1, 2], one, 0)
        cache.insert([3, 4], one, 0)
    assert [*cache.blocks_by_digest().values()] == [[1, 3], [2, 4]]


def test_a_new_prefix_is_hashed_when_its_first_block_is_cached() -> None:
    transaction = Transaction()
    cache = PrefixCache(9, transaction)
    expected = hashed(3, 4, 5, 6, 7, 8).digests
    for is_cached in (False, True):
        one = prefix(3, 4, 5, 6, 7, 8)
        cache.prepare(one)
        assert one.digests == (expected if is_cached else expected[:1])
        with transaction:
            cache.insert([2 + is_cached], one, 0)
    short = prefix(3)
    cache.prepare(short)
    assert short.digests == []


@pytest.mark.parametrize(
    "change",
    [
        lambda cache, one: cache.evict([3]),
        lambda cache, one: cache.evict([3, 2]),
        lambda cache, one: cache.evict([3, 2, 1]),
        lambda cache, one: cache.insert([4], one, 3),
        lambda cache, one: cache.insert([4, 5, 6, 7], one, 0),
        lambda cache, one: cache.insert([4, 5], prefix(3, 4, 9, 9), 0),
        lambda cache, one: cache.insert([4, 5], prefix(9, 9, 9, 9), 0),
        lambda cache, one: cache.find_longest_hit(one, 3),
        lambda cache, one: cache.find_longest_hit(prefix(3, 4, 9, 9), 2),
        lambda cache, one: cache.clear(),
    ],
)
def test_a_change_of_unhashed_blocks_is_taken_back_from_any_line(
    change: Callable[[PrefixCache, PrefixDigests], object],
) -> None:
    transaction = Transaction()
    cache = PrefixCache(9, transaction)
    one = prefix(3, 4, 5, 6, 7, 8, 9, 10)
    with transaction:
        cache.insert([1, 2, 3], one, 0)
    before = state_of((cache, one))
    for number in count(1):
        with suppress(InjectedError), transaction:
            call_with_failing_line(number, partial(change, cache, one))
            break
        assert state_of((cache, one)) == before, f"line event {number}"
    assert number > 8
    assert state_of((cache, one)) != before


def test_the_last_unhashed_block_takes_its_prefix_along() -> None:
    transaction = Transaction()
    cache = PrefixCache(9, transaction)
    one = prefix(3, 4, 5, 6, 7, 8)
    with suppress(TakenBackError), transaction:
        cache.insert([1, 2, 3], one, 0)
        raise TakenBackError
    assert (cache.unhashed_prefixes(), one.unhashed) == ({}, [])
    with transaction:
        cache.insert([1, 2, 3], one, 0)
        cache.evict([3])
        assert cache.unhashed_prefixes() == {DIGEST: one}
        cache.evict([2])
        assert (cache.unhashed_prefixes(), one.unhashed) == ({}, [])
    assert cache.block_hash == [None, DIGEST, *[None] * 7]
    cache.clear()
    assert (cache.unhashed_prefixes(), cache.block_hash) == ({}, [None] * 9)


def test_a_prompt_whose_beginning_is_cached_is_not_kept_packed() -> None:
    scheduler = make()
    add(scheduler, "a", [5] * 9)
    update(scheduler, scheduler.schedule(), a=7)
    for prompt, is_packed in (([5] * 13, False), ([9] * 13, True)):
        prefix = add(scheduler, f"{prompt[0]}", prompt).prefix
        assert prefix is not None
        assert (prefix.packed is not None) == is_packed
