"""The block pool refuses what it cannot give."""

import pytest

from segattn.scheduler.block_pool import BlockPool
from segattn.scheduler.transaction import Transaction


def test_more_blocks_than_are_free_cannot_be_taken() -> None:
    pool = BlockPool(4, None, Transaction())
    with pytest.raises(ValueError, match="num_blocks=4: only 3 are free"):
        pool.take(4)
    assert list(pool.free_list()) == [1, 2, 3]
    assert list(pool.take(3)) == [1, 2, 3]
    with pytest.raises(ValueError, match="only 0 are free"):
        pool.take(1)
