"""bn_stats, bn_aggr, max8, nc_find_index8 and nc_match_replace8."""

from typing import Any

import numpy as np
import pytest

from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, nisa, nl, run

TEXT: Any = "0"


def test_bn_stats_counts_even_and_odd_elements_apart() -> None:
    data = np.array([[1, 10, 3, 20, 5]], np.float32)
    found = run(lambda dst, d: nisa.bn_stats(dst, d), data, out=((1, 6), "float32"))
    # Even: 1, 3, 5 (mean 3, variance * count 8); odd: 10, 20 (mean 15, 50).
    np.testing.assert_array_equal(found, [[3, 3, 8, 2, 15, 50]])


def test_bn_aggr_joins_the_statistics_of_several_tiles() -> None:
    data = floats(8, 700)

    def body(dst: Any, d: Any) -> None:
        stats = nl.ndarray((8, 12), dtype=nl.float32)
        nisa.bn_stats(stats[:, 0:6], d[:, 0:512])
        nisa.bn_stats(stats[:, 6:12], d[:, 512:700])
        nisa.bn_aggr(dst, stats)

    found = run(body, data, out=((8, 2), "float32"))
    wide = data.astype(np.float64)
    np.testing.assert_allclose(found[:, 0], wide.mean(axis=1), atol=1e-6)
    np.testing.assert_allclose(found[:, 1], wide.var(axis=1), rtol=1e-5)


def test_batch_statistics_refuse_wrong_widths() -> None:
    for body, shape, message in (
        (lambda dst, d: nisa.bn_stats(dst, d), (2, 6), "limit 512"),
        (lambda dst, d: nisa.bn_stats(dst, d[:, 0:4]), (2, 5), r"needed \[2, 6\]"),
        (lambda dst, d: nisa.bn_aggr(dst, d[:, 0:4]), (2, 2), "multiples of 3"),
    ):
        with pytest.raises(NkiValidationError, match=message):
            run(body, floats(2, 513), out=(shape, "float32"))


def test_max8_sorts_the_eight_largest_descending_and_casts_them() -> None:
    data = np.array([[3, -1, 9, 9, 2, 7, 8, 1, 0, 5]], np.float32)
    found = run(lambda dst, d: nisa.max8(dst, d), data, out=((1, 8), "bfloat16"))
    assert found.astype(np.float32).tolist() == [[9, 9, 8, 7, 5, 3, 2, 1]]


@pytest.mark.parametrize("num", [7, 16385])
def test_max8_reads_8_to_16384_elements(num: int) -> None:
    with pytest.raises(NkiValidationError, match=r"allowed: 8\.\.16384"):
        run(lambda dst, d: nisa.max8(dst, d), floats(1, num), out=((1, 8), "float32"))


@pytest.mark.parametrize(("dtype", "missing"), [("uint32", 2**32 - 1), ("uint16", 2**16 - 1)])
def test_find_index8_pairs_duplicates_ascending_and_marks_missing_values(
    dtype: str, missing: int
) -> None:
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 5]], np.float32)
    vals = np.array([[8, 3, 8, 6, 8, 1, 8, 2]], np.float32)
    found = run(lambda dst, d, v: nisa.nc_find_index8(dst, d, v), data, vals, out=((1, 8), dtype))
    assert found.tolist() == [[4, 2, 5, missing, 6, 0, missing, 1]]


def test_match_replace8_is_the_documented_example() -> None:
    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    vals = np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32)

    def indices(dst: Any, d: Any, v: Any) -> None:
        replaced = nl.ndarray((1, 11), dtype=nl.float32)
        nisa.nc_match_replace8(replaced, d, v, 0.0, dst)

    found = run(indices, data, vals, out=((1, 8), "uint32"))
    assert found.tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]
    replaced = run(lambda dst, d, v: nisa.nc_match_replace8(dst, d, v, -1.0), data, vals)
    assert replaced.tolist() == [[1, 2, -1, 4, -1, -1, -1, -1, -1, -1, -1]]


def test_match_replace8_replaces_one_occurrence_per_value() -> None:
    data = np.array([[5, 5, 5, 1, 2, 3, 4, 6]], np.float32)
    vals = np.array([[5, 7, 7, 7, 7, 7, 7, 7]], np.float32)
    found = run(lambda dst, d, v: nisa.nc_match_replace8(dst, d, v, 0.0), data, vals)
    assert found.tolist() == [[0, 5, 5, 1, 2, 3, 4, 6]]


def test_searches_refuse_other_widths_and_index_dtypes() -> None:
    data, vals = floats(2, 8), floats(2, 7)
    for body, out, message in (
        (lambda dst, d, v: nisa.nc_find_index8(dst, d, v), ((2, 8), "uint32"), r"needed \[2, 8\]"),
        (lambda dst, d, v: nisa.nc_find_index8(dst, d, d), ((2, 8), "int32"), "dtype int32"),
        (lambda dst, d, v: nisa.nc_match_replace8(dst, d, d, TEXT), ((2, 8), "float32"), "imm '0'"),
    ):
        with pytest.raises(NkiValidationError, match=message):
            run(body, data, vals, out=out)
