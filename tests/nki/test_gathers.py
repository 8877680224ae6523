"""local_gather, nc_n_gather and nc_stream_shuffle, by the documented definitions."""

from typing import Any

import numpy as np
import pytest

from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, nisa, run

MASK = [*range(1, 32), 0]


def test_local_gather_takes_the_flattened_indices_of_its_own_16_partitions() -> None:
    data = floats(32, 8)
    # Flattened partition first: core 0 reads index [p, 0] for p = 0..15, core 1 its own.
    index = np.stack([np.arange(32) % 8, (np.arange(32) * 3) % 8], axis=1).astype(np.uint16)
    found = run(
        lambda dst, d, i: nisa.local_gather(dst, d, i), data, index, out=((32, 32), "float32")
    )
    for p in range(32):
        core = index[p // 16 * 16 :][:16]
        expected = [data[p, core[row, column]] for column in range(2) for row in range(16)]
        np.testing.assert_array_equal(found[p], expected)


def test_local_gather_reads_runs_of_elements_and_only_the_valid_indices() -> None:
    data = np.tile(np.arange(8, dtype=np.float32), (16, 1)) + 10 * np.arange(16)[:, None]
    data = data.astype(np.float32)
    index = np.zeros((16, 1), np.uint16)
    index[:3, 0] = [6, 0, 4]
    found = run(
        lambda dst, d, i: nisa.local_gather(dst, d, i, num_elem_per_idx=2, num_valid_indices=3),
        data,
        index,
        out=((16, 6), "float32"),
    )
    np.testing.assert_array_equal(found[0], [6, 7, 0, 1, 4, 5])
    np.testing.assert_array_equal(found[15], [156, 157, 150, 151, 154, 155])


@pytest.mark.parametrize(
    ("data", "index", "out", "options", "message"),
    [
        (floats(16, 8), np.zeros((16, 1), np.int32), ((16, 16), "float32"), {}, "uint16"),
        (floats(8, 8), np.zeros((8, 1), np.uint16), ((8, 16), "float32"), {}, "multiple of 16"),
        (floats(16, 8), np.zeros((16, 1), np.uint16), ((16, 16), "bfloat16"), {}, "dst has dtype"),
        (floats(16, 8), np.zeros((16, 1), np.uint16), ((16, 15), "float32"), {}, "needed 16"),
        (floats(16, 8), np.full((16, 1), 8, np.uint16), ((16, 16), "float32"), {}, "index 8"),
        (
            floats(16, 8),
            np.zeros((16, 1), np.uint16),
            ((16, 48), "float32"),
            {"num_elem_per_idx": 3},
            "num_elem_per_idx 3",
        ),
        (
            floats(16, 8),
            np.zeros((16, 1), np.uint16),
            ((16, 17), "float32"),
            {"num_valid_indices": 17},
            "17 indices per core",
        ),
    ],
)
def test_local_gather_refuses(
    data: Any, index: Any, out: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(NkiValidationError, match=message):
        run(lambda dst, d, i: nisa.local_gather(dst, d, i, **options), data, index, out=out)


def test_nc_n_gather_indexes_each_partition_flattened() -> None:
    data = floats(4, 2, 3)
    index = np.array([[5, 0], [1, 1], [2, 4], [3, 5]], np.uint32)
    found = run(lambda dst, d, i: nisa.nc_n_gather(dst, d, i), data, index, out=((4, 2), "float32"))
    flat = data.reshape(4, 6)
    np.testing.assert_array_equal(found, [flat[p, index[p]] for p in range(4)])


def test_nc_n_gather_refuses_indices_that_are_out_of_range_or_of_another_dtype() -> None:
    data, out = floats(4, 6), ((4, 2), "float32")
    for index, message in (
        (np.full((4, 2), 6, np.uint32), r"index 6; allowed: 0..5"),
        (np.zeros((4, 2), np.int32), "uint32"),
    ):
        with pytest.raises(NkiValidationError, match=message):
            run(lambda dst, d, i: nisa.nc_n_gather(dst, d, i), data, index, out=out)


def test_stream_shuffle_moves_partitions_inside_each_quadrant() -> None:
    data = floats(64, 5)
    found = run(lambda dst, src: nisa.nc_stream_shuffle(dst, src, MASK), data)
    for quadrant in (0, 32):
        np.testing.assert_array_equal(found[quadrant : quadrant + 31], data[quadrant + 1 :][:31])
        np.testing.assert_array_equal(found[quadrant + 31], data[quadrant])


def test_stream_shuffle_leaves_the_partitions_marked_255() -> None:
    def body(dst: Any, src: Any) -> None:
        nisa.memset(dst, 7)
        nisa.nc_stream_shuffle(dst, src, [0, 255] * 16)

    data = np.arange(64, dtype=np.int32).reshape(32, 2)
    found = run(body, data)
    np.testing.assert_array_equal(found[0::2], np.tile(data[0], (16, 1)))
    np.testing.assert_array_equal(found[1::2], np.full((16, 2), 7))


def test_stream_shuffle_reads_partitions_of_the_tile_beyond_a_one_partition_view() -> None:
    data = floats(32, 3)
    found = run(lambda dst, src: nisa.nc_stream_shuffle(dst, src[0:1], MASK), data)
    np.testing.assert_array_equal(found, np.roll(data, -1, axis=0))


def test_stream_shuffle_refuses_wrong_masks_dtypes_and_starts() -> None:
    data = floats(128, 4)
    for body, message in (
        (lambda d, s: nisa.nc_stream_shuffle(d, s, [0] * 31), "32 entries"),
        (lambda d, s: nisa.nc_stream_shuffle(d, s, [32] * 32), "32 entries"),
        (lambda d, s: nisa.nc_stream_shuffle(d[0:32], s[16:48], MASK), "partition 16"),
    ):
        with pytest.raises(NkiValidationError, match=message):
            run(body, data)
    with pytest.raises(NkiValidationError, match="both must agree"):
        run(
            lambda d, s: nisa.nc_stream_shuffle(d, s, MASK),
            data,
            out=((128, 4), "bfloat16"),
        )
