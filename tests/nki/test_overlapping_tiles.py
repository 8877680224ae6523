"""Tiles with addresses that overlap: whose bytes a read finds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.reference import nki
from segattn.reference.nki.errors import (
    NkiValidationError,
)

nl, nisa = nki.language, nki.isa


@nki.jit
def overlap_kernel(distance: Any, rewrite: Any) -> None:
    """Write a, then b at `distance` bytes from it, then read a."""
    a = nl.ndarray((128, 4), dtype=nl.float32, address=(0, 0))
    b = nl.ndarray((128, 4), dtype=nl.float32, address=(0, distance), name="b")
    nisa.memset(a, 1.0)
    nisa.memset(b, 2.0)
    if rewrite:
        nisa.memset(a, 3.0)
    nisa.tensor_copy(nl.ndarray((128, 4), dtype=nl.float32), a)


def test_reading_a_tile_that_an_overlapping_one_has_overwritten_is_an_error() -> None:
    overlap_kernel(16, False)
    overlap_kernel(12, True)
    with pytest.raises(NkiValidationError, match=r"was overwritten by nisa\.memset to 'b'"):
        overlap_kernel(12, False)
    with nki.strict(address_overlap="off"):
        overlap_kernel(12, False)


def test_only_the_overwritten_part_of_a_tile_is_lost() -> None:
    @nki.jit
    def kernel(start: Any) -> None:
        a = nl.ndarray((128, 8), dtype=nl.float32, address=(0, 0))
        b = nl.ndarray((32, 4), dtype=nl.float32, address=(32, 16))
        nisa.memset(a, 1.0)
        nisa.memset(b, 2.0)
        got = nl.ndarray((32, 4), dtype=nl.float32)
        nisa.tensor_copy(got, a[32:64, 0:4])
        nisa.tensor_copy(got, a[64:96, 4:8])
        nisa.tensor_copy(got, a[32:64, start : start + 4])

    kernel(0)
    with pytest.raises(NkiValidationError, match="was overwritten"):
        kernel(1)


def test_a_second_tile_at_the_address_of_a_written_one_reads_its_bytes() -> None:
    @nki.jit
    def kernel() -> Any:
        out = nl.ndarray((128, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.memset(nl.ndarray((128, 8), dtype=nl.float32, address=(0, 64)), 5.0)
        nisa.dma_copy(out, nl.ndarray((128, 4), dtype=nl.float32, address=(0, 80)))
        return out

    np.testing.assert_array_equal(kernel(), np.full((128, 4), 5.0))


@st.composite
def _accesses(draw: st.DrawFn) -> list[tuple[int, bool, int, int, int]]:
    """(tile, whether it writes, first column, columns, step) for three overlapping tiles."""
    steps = []
    for _ in range(draw(st.integers(1, 10))):
        first, step = draw(st.integers(0, 7)), draw(st.integers(1, 2))
        num = draw(st.integers(1, (8 - first + step - 1) // step))
        steps.append((draw(st.integers(0, 2)), draw(st.booleans()), first, num, step))
    return steps


@given(_accesses(), st.lists(st.integers(0, 8), min_size=3, max_size=3))
def test_a_read_fails_exactly_when_it_meets_bytes_its_tile_wrote_and_another_replaced(
    steps: list[tuple[int, bool, int, int, int]], columns: list[int]
) -> None:
    """Tiles of 8 float32 columns at the given columns of one row of memory."""
    outcome: list[str] = []

    @nki.jit
    def kernel() -> None:
        everything = nl.ndarray((1, 16), dtype=nl.float32, address=(0, 0))
        nisa.memset(everything, 0.0)
        tiles = [nl.ndarray((1, 8), dtype=nl.float32, address=(0, 4 * c)) for c in columns]
        # per tile and column of memory: 0 never written by it, 1 its own, 2 replaced
        state = np.zeros((3, 16), np.int64)
        for tile, writes, first, num, step in steps:
            view = tiles[tile][:, first : min(first + num * step, 8) : step]
            touched = columns[tile] + np.arange(first, first + num * step, step)[: view.shape[1]]
            if writes:
                nisa.memset(view, 1.0)
                for other in range(3):
                    if other != tile:
                        mine = state[other, touched]
                        state[other, touched] = np.where(mine == 1, 2, mine)
                state[tile, touched] = 1
                continue
            expected = bool((state[tile, touched] == 2).any())
            try:
                nisa.tensor_copy(nl.ndarray(view.shape, dtype=nl.float32), view)
                failed = False
            except NkiValidationError:
                failed = True
            outcome.append("same" if failed == expected else "different")

    kernel()
    assert "different" not in outcome
