"""all_to_all_v and all_gather_v in two steps: prepare reads metadata, trigger moves the data."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError

nl, nisa = nki.language, nki.isa
ncc: Any = nki.collectives
PAIR = ncc.ReplicaGroup([[0, 1]])
FOUR = ncc.ReplicaGroup([[0, 1, 2, 3]])
# Rows: counts, displacements, received counts (written), one column per destination.
TABLES = [[[1, 3], [0, 2], [9, 9]], [[2, 0], [4, 0], [9, 9]]]


def arguments() -> list[list[Any]]:
    x = [np.arange(6, dtype=np.float32) + 10 * rank for rank in range(2)]
    return [
        [x[rank], np.array(TABLES[rank], np.uint32), np.full(6, -1, np.float32)]
        for rank in range(2)
    ]


def test_the_metadata_counts_when_it_is_prepared_and_the_data_when_it_is_triggered() -> None:
    @nki.jit
    def kernel(x: Any, metadata: Any, dst: Any) -> Any:
        prepared = ncc.all_to_all_v_prepare([x], [dst], PAIR, metadata)
        nisa.dma_copy(metadata[0:2], nl.zeros((2, 2), nl.uint32, nl.hbm))  # too late
        nisa.dma_copy(x, nl.full((6,), 5.0, nl.float32, nl.hbm))  # in time
        ncc.all_to_all_v_trigger(prepared)
        return dst, metadata

    first, second = nki.run_ranks(kernel, arguments())
    np.testing.assert_array_equal(first[0], [5, -1, -1, 5, 5, -1])
    np.testing.assert_array_equal(second[0], [5, 5, 5, -1, -1, -1])
    assert first[1][2].tolist() == [1, 2]
    assert second[1][2].tolist() == [3, 0]


def test_all_gather_v_in_two_steps_is_all_gather_v() -> None:
    @nki.jit
    def kernel(x: Any, metadata: Any, dst: Any) -> Any:
        call = ([x], [dst], FOUR, metadata)
        ncc.all_gather_v_trigger(ncc.all_gather_v_prepare(*call, recv_counts_known=True))
        return dst, metadata

    def metadata(rank: int) -> Any:
        table = np.full((3, 4), 7, np.uint32)
        table[0, 0], table[1, 0] = rank % 2 + 1, rank
        return table

    x = [np.arange(6, dtype=np.float32) + 10 * rank for rank in range(4)]
    inputs = [[x[rank], metadata(rank), np.full(8, -1, np.float32)] for rank in range(4)]
    for dst, table in nki.run_ranks(kernel[2], inputs):
        np.testing.assert_array_equal(dst, [0, -1, 11, 12, 22, -1, 33, 34])
        assert table[2].tolist() == [7] * 4


def twice(call: Any) -> None:
    ncc.all_to_all_v_prepare(*call)
    ncc.all_to_all_v_prepare(*call)


def again(call: Any) -> None:
    prepared = ncc.all_to_all_v_prepare(*call)
    ncc.all_to_all_v_trigger(prepared)
    ncc.all_to_all_v_trigger(prepared)


def never(call: Any) -> None:
    ncc.all_to_all_v_prepare(*call)


def of_another_kind(call: Any) -> None:
    ncc.all_gather_v_trigger(ncc.all_to_all_v_prepare(*call))


def of_nothing(call: Any) -> None:
    ncc.all_to_all_v_trigger(None)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (twice, "all_to_all_v_prepare is prepared already; trigger it first"),
        (again, "is not the prepared collective; allowed: what ncc.all_to_all_v_prepare returned"),
        (never, r"ends with a prepared collective .ncc.all_to_all_v_prepare."),
        (of_another_kind, "ncc.all_to_all_v_prepare prepared another collective"),
        (of_nothing, "prepare_instr None is not the prepared"),
    ],
)
def test_one_prepare_is_followed_by_its_trigger(body: Any, text: str) -> None:
    @nki.jit
    def kernel(x: Any, metadata: Any, dst: Any) -> Any:
        body(([x], [dst], PAIR, metadata))
        return dst

    with pytest.raises(NkiValidationError, match=text):
        nki.run_ranks(kernel, arguments())
