"""Searches and cross-partition reductions on GpSimd, by the documented examples."""

from typing import Any

import numpy as np
import pytest

from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, nisa, nl, run


@pytest.mark.parametrize(
    ("op", "expected"),
    [(nl.add, [12, -3]), (nl.average, [4, -1]), (nl.maximum, [9, 2])],
)
def test_partition_reduce_folds_the_partitions(op: Any, expected: list[float]) -> None:
    data = np.array([[1, 2], [2, -6], [9, 1]], np.float32)
    found = run(
        lambda dst, d: nisa.tensor_partition_reduce(dst, op, d), data, out=((1, 2), "float32")
    )
    np.testing.assert_array_equal(found, [expected])


def test_partition_reduce_of_bits() -> None:
    data = np.array([[0b0110], [0b1010]], np.int32)
    for op, expected in ((nl.bitwise_or, 0b1110), (nl.bitwise_and, 0b0010)):
        found = run(
            lambda dst, d, op=op: nisa.tensor_partition_reduce(dst, op, d),
            data,
            out=((1, 1), "int32"),
        )
        assert found.tolist() == [[expected]]


def test_partition_reduce_refuses_other_operators_and_shapes() -> None:
    for op, shape, message in (
        (nl.multiply, (1, 2), "op 'multiply'"),
        (nl.add, (3, 2), "needed 1 partition"),
    ):
        with pytest.raises(NkiValidationError, match=message):
            run(
                lambda dst, d, op=op: nisa.tensor_partition_reduce(dst, op, d),
                floats(3, 2),
                out=(shape, "float32"),
            )


def test_nonzero_with_count_is_the_documented_example() -> None:
    def body(dst: Any, src: Any) -> None:
        nisa.memset(dst, 99)
        nisa.nonzero_with_count(dst, src, index_offset=16, padding_val=-1)

    data = np.zeros((32, 8), np.int32)
    data[0] = [0, 1, 1, 0, 0, 1, 0, 0]
    data[1] = 1
    data[16] = 5
    found = run(body, data, out=((32, 9), "int32"))
    assert found[0].tolist() == [17, 18, 21, -1, -1, -1, -1, -1, 3]
    assert found[16].tolist() == [*range(16, 24), 8]
    # Each GpSimd core reads and writes its first partition only.
    np.testing.assert_array_equal(found[1:16], np.full((15, 9), 99))


def test_nonzero_with_count_refuses_other_sizes_and_dtypes() -> None:
    for out, data, message in (
        (((1, 8), "int32"), np.zeros((1, 8), np.int32), "x 9 elements"),
        (((1, 9), "float32"), np.zeros((1, 8), np.int32), "dtype float32"),
        (((1, 9), "int32"), np.zeros((1, 8), np.int16), "dtype int16"),
    ):
        with pytest.raises(NkiValidationError, match=message):
            run(lambda dst, src: nisa.nonzero_with_count(dst, src), data, out=out)


def test_sequence_bounds_gives_the_run_of_each_segment() -> None:
    # Runs: id 0 at 0, id 1 at 1..2, id 2 at 3..5; id 0 gives (n, -1).
    ids = np.array([[0, 1, 1, 2, 2, 2]], np.int32)
    found = run(lambda dst, s: nisa.sequence_bounds(dst, s), ids, out=((1, 2, 6), "int32"))
    assert found.tolist() == [[[6, 1, 1, 3, 3, 3], [-1, 3, 3, 6, 6, 6]]]


def test_sequence_bounds_needs_one_partition_and_a_pair_of_rows() -> None:
    with pytest.raises(NkiValidationError, match=r"needed \[1, n\] and \[1, 2, n\]"):
        run(
            lambda dst, s: nisa.sequence_bounds(dst, s),
            np.ones((1, 4), np.int32),
            out=((1, 4), "int32"),
        )


def test_topk_finds_the_largest_of_a_snake_of_16_partitions_in_ascending_order() -> None:
    n, k = 42, 8
    rng = np.random.default_rng(0)
    values = rng.permutation(64).astype(np.float32)
    # Element i lies in partition i % 16, column i // 16; the last 6 are beyond n.
    data = values[:48].reshape(3, 16).T.astype(np.dtype("bfloat16"))

    def indices(dst: Any, src: Any) -> None:
        best = nl.ndarray((16, k), dtype=nl.bfloat16)
        nisa.topk(best, dst, src, n)

    def largest(dst: Any, src: Any) -> None:
        index = nl.ndarray((16, k), dtype=nl.uint32)
        nisa.topk(dst, index, src, n)

    order = np.argsort(values[:n])[-k:]
    np.testing.assert_array_equal(run(indices, data, out=((16, k), "uint32"))[0], order)
    best = run(largest, data, out=((16, k), "bfloat16"))
    np.testing.assert_array_equal(best[5].astype(np.float32), values[order])


@pytest.mark.parametrize(
    ("n", "k", "message"),
    [(7, 4, "n 7"), (16, 17, "K 17"), (64, 8, "at least 4 elements")],
)
def test_topk_refuses_sizes_outside_its_range(n: int, k: int, message: str) -> None:
    def body(dst: Any, src: Any) -> None:
        index = nl.ndarray((16, k), dtype=nl.uint32)
        nisa.topk(dst, index, src, n)

    with pytest.raises(NkiValidationError, match=message):
        run(body, floats(16, 3, dtype=np.dtype("bfloat16")), out=((16, k), "bfloat16"))
