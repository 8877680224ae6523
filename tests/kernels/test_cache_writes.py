"""The plan of a cache write: every token in exactly one place, and few descriptors where it can."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels.plan.cache_writes import CacheWrites, column_writes, row_writes, run_tokens
from segattn.kernels.sizes import EDGE_BLOCKS
from segattn.tests.kernels.cases import Array, block_sizes, seeds


def mapping(seed: int, tokens: int, first: int, shuffled: bool, padding: float) -> Array:
    """Slots in a row or anywhere, of which some are not written."""
    rng = np.random.default_rng(seed)
    slots = np.arange(first, first + tokens, dtype=np.int32)
    if shuffled:
        slots = rng.permutation(2 * tokens)[:tokens].astype(np.int32)
    slots[rng.random(tokens) < padding * 0.3] = -1
    return slots


def columns_of(plan: CacheWrites, count: int) -> tuple[int, Array, Array]:
    """First token, (row, KV head) of `count` runs, and the columns behind them."""
    end = 1 + 2 * -(-count // 128)
    table = plan.indices
    of_runs = table[:, 1:end].reshape(128, -1, 2).transpose(1, 0, 2).reshape(-1, 2)
    assert (of_runs[count:, 0] == -1).all()
    return int(table[0, 0]), of_runs[:count], table[:, end:]


def runs_of(tokens: int, run: int) -> int:
    """Runs that fit behind any first token below `run`."""
    return max(0, (tokens - run + 1) // run) if run else 0


arguments = given(
    seed=seeds,
    tokens=st.integers(1, 900),
    heads=st.integers(1, 3),
    block_size=block_sizes,
    first=st.integers(0, 300),
    shuffled=st.booleans(),
    padding=st.sampled_from([0.0, 0.02, 1.0]),
)


@arguments
def test_rows_take_every_token_once(
    seed: int, tokens: int, heads: int, block_size: int, first: int, shuffled: bool, padding: float
) -> None:
    slots = mapping(seed, tokens, first, shuffled, padding)
    plan = row_writes(slots, heads, block_size, run_tokens(block_size, 256))
    runs = runs_of(tokens, plan.run)
    begin, of_runs, singles = columns_of(plan, heads * runs)
    written: dict[int, int] = {}  # row of the cache -> row of the chunk

    def write(row: int, source: int) -> None:
        assert row not in written
        written[row] = source

    for i, (row, head) in enumerate(of_runs.tolist()):
        assert head == i // runs
        for j in range(plan.run if row >= 0 else 0):
            write(row * plan.run + j, head * tokens + begin + i % runs * plan.run + j)
    for source, row, head in singles.reshape(128, -1, 3).reshape(-1, 3).tolist():
        if row >= 0:
            assert source // tokens == head
            write(row, source)
    expected = {
        (slot // block_size * heads + head) * block_size + slot % block_size: head * tokens + token
        for token, slot in enumerate(slots.tolist()) if slot >= 0 for head in range(heads)
    }  # fmt: skip
    assert written == expected


@arguments
def test_columns_take_every_token_once(
    seed: int, tokens: int, heads: int, block_size: int, first: int, shuffled: bool, padding: float
) -> None:
    slots = mapping(seed, tokens, first, shuffled, padding)
    parts = 2
    plan = column_writes(slots, heads, block_size, parts)
    runs = runs_of(tokens, plan.run)
    begin, of_runs, singles = columns_of(plan, parts * heads * runs)
    written: dict[tuple[int, int], int] = {}  # row and place -> row of the chunk

    def write(row: int, place: int, source: int) -> None:
        assert (row, place) not in written
        written[row, place] = source

    for i, (row, head) in enumerate(of_runs.tolist()):
        part, own = divmod(i // runs, heads)
        assert head == own
        for j in range(plan.run if row >= 0 else 0):
            write(row, j, (head * tokens + begin + i % runs * plan.run + j) * parts + part)
    width = 2 + block_size if plan.run else 4
    for tile in singles.reshape(128, -1, width).transpose(1, 0, 2):
        rows = tile[tile[:, 0] >= 0, 0]
        assert len(set(rows.tolist())) == len(rows), "two entries of a tile change one block"
        for row, head, *rest in tile.tolist():
            if row < 0:
                continue
            assert row // parts % heads == head
            places = [(rest[1], rest[0])] if not plan.run else list(enumerate(rest))
            for place, source in places:
                if source >= 0:
                    write(row, place, source)
    expected = {
        ((slot // block_size * heads + head) * parts + part, slot % block_size):
        (head * tokens + token) * parts + part
        for token, slot in enumerate(slots.tolist()) if slot >= 0
        for head in range(heads) for part in range(parts)
    }  # fmt: skip
    assert written == expected


@pytest.mark.parametrize("first", [0, 5, 31])
@pytest.mark.parametrize("real", [2048, 1500])
def test_a_chunk_in_order_has_one_program_wherever_it_begins(first: int, real: int) -> None:
    slots = np.full(2048, -1, np.int32)
    slots[:real] = np.arange(64 + first, 64 + first + real)
    rows, columns = row_writes(slots, 8, 32, 16), column_writes(slots, 8, 32, 1)
    # 127 runs of 16 tokens and 32 single tokens of 8 heads; 63 blocks and three more of 8 heads.
    assert (rows.run, rows.indices.shape) == (16, (128, 1 + 2 * 8 + 3 * 2))
    assert (columns.run, columns.indices.shape) == (32, (128, 1 + 2 * 4 + 2 + 32))
    assert EDGE_BLOCKS == 3


def test_decode_has_single_tokens() -> None:
    slots = np.arange(64, dtype=np.int32) * 40
    rows, columns = row_writes(slots, 8, 32, 16), column_writes(slots, 8, 32, 1)
    assert (rows.run, rows.indices.shape) == (0, (128, 1 + 3 * 4))
    assert (columns.run, columns.indices.shape) == (0, (128, 1 + 4 * 4))


def test_without_runs_the_chunk_is_stored_in_its_own_order() -> None:
    """Row i of the list is row i of the chunk, so that no load needs an index."""
    slots = np.array([5, -1, 40, 7, -1], np.int32)
    plan = row_writes(slots, 3, 16, 16)
    listed = plan.indices[:, 1:]
    assert (plan.run, listed.shape) == (0, (128, 3))
    assert listed[:15, 0].tolist() == list(range(15))
    assert listed[:5, 1].tolist() == [5, -1, 2 * 3 * 16 + 8, 7, -1]


@pytest.mark.parametrize(("tokens", "run"), [(64, 0), (67, 0), (68, 16), (2048, 16)])
def test_few_tokens_are_stored_one_by_one(tokens: int, run: int) -> None:
    """Runs of 16 leave up to 32 single ones, gathered and scattered: 64 descriptors and 3 runs."""
    assert row_writes(np.arange(8, 8 + tokens, dtype=np.int32), 8, 32, 16).run == run
