"""The block pool refuses what it cannot give."""

import pytest

from segattn.scheduler.block_pool import BlockPool


def test_more_blocks_than_are_free_cannot_be_taken() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="num_blocks=4: only 3 are free"):
        pool.take(4)
    assert list(pool.free) == [1, 2, 3]
    assert pool.take(3) == [1, 2, 3]
    with pytest.raises(ValueError, match="only 0 are free"):
        pool.take(1)


def test_of_blocks_with_one_digest_the_earliest_is_found_until_it_is_taken() -> None:
    pool = BlockPool(6)
    first, second, third = pool.take(3)
    pool.insert([first, second, third], [b"x", b"x", b"x"])
    assert pool.find_longest_hit([b"x", b"y"]) == [first]
    pool.release([[second], [first]])
    assert pool.take(4) == [4, 5, second, first]
    assert pool.find_longest_hit([b"x"]) == [third]
    assert pool.blocks_by_digest() == {b"x": [third]}


def test_a_block_that_holds_something_else_by_now_is_not_forgotten() -> None:
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.insert(blocks, [b"x", b"y"])
    pool.forget([(blocks[0], b"x"), (blocks[1], b"z")])
    pool.rebuild([blocks])
    assert pool.blocks_by_digest() == {b"y": [blocks[1]]}


def test_everything_is_derived_from_block_tables() -> None:
    pool = BlockPool(7)
    blocks = pool.take(4)
    pool.insert(blocks[:2], [b"x", b"y"])
    pool.ref_counts = [9] * 7
    del pool.free[6]
    pool.rebuild([[1, 2], [1, 3]])
    assert pool.ref_counts == [0, 2, 1, 1, 0, 0, 0]
    assert list(pool.free) == [6, 4, 5]
    assert pool.blocks_by_digest() == {b"x": [1], b"y": [2]}


def test_a_block_is_evicted_only_under_the_digest_that_it_has() -> None:
    pool = BlockPool(4)
    (block,) = pool.take(1)
    pool.insert([block], [b"new"])
    # Cached, freed, taken and cached again in one step: two entries, one of which holds.
    pool.evict([(block, b"old")])
    assert pool.blocks_by_digest() == {b"new": [block]}
    pool.evict([(block, b"old"), (block, b"new")])
    assert pool.blocks_by_digest() == {}
