"""Collectives over simulated ranks; values worked out by hand or by NumPy on the whole data."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import DeadlockError, NkiValidationError

nl, nisa = nki.language, nki.isa
ncc: Any = nki.collectives
Group = ncc.ReplicaGroup
Array = Any
X = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]]
RANKS = [np.array(values, np.float32) for values in X]


def collect(
    body: Callable[..., None], inputs: list[Array], shape: tuple[int, ...], cores: int = 1
) -> list[Array]:
    """Run `body(dst, src)` on a copy of each rank's input in HBM and return each rank's dst."""

    @nki.jit
    def kernel(x: Any) -> Any:
        src = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm, name="src")
        dst = nl.ndarray(shape, dtype=x.dtype, buffer=nl.shared_hbm, name="dst")
        out = nl.ndarray(shape, dtype=x.dtype, buffer=nl.shared_hbm, name="out")
        if nl.program_id(0) == 0:
            nisa.dma_copy(dst=src, src=x)
        body(dst, src)
        if nl.program_id(0) == 0:
            nisa.dma_copy(dst=out, src=dst)
        return out

    launch = kernel if cores == 1 else kernel[cores]
    return nki.run_ranks(launch, [[array.copy()] for array in inputs])


@pytest.mark.parametrize("cores", [1, 2])
def test_all_reduce_gives_every_rank_the_sum(cores: int) -> None:
    both = Group([[0, 1]])
    found = collect(lambda d, s: ncc.all_reduce([s], [d], both, nl.add), RANKS, (2, 3), cores)
    for result in found:
        np.testing.assert_array_equal(result, [[8, 10, 12], [14, 16, 18]])


@pytest.mark.parametrize(
    ("op", "expected"), [(nl.maximum, [[9, 2], [5, 7]]), (nl.minimum, [[-1, 1], [4, -7]])]
)
def test_all_reduce_takes_maximum_and_minimum(op: Any, expected: Any) -> None:
    values = [np.array(v, np.int32) for v in ([[9, 1], [4, 7]], [[-1, 2], [5, -7]])]
    group = Group([[0, 1]])
    found = collect(lambda d, s: ncc.all_reduce([s], [d], group, op), values, (2, 2))
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(found[1], expected)


def test_all_reduce_of_half_precision_sums_in_float32() -> None:
    # 256 + 1 is 256 in bfloat16; the fp32 sum 258 rounds once.
    values = [np.full((1, 1), v, np.dtype("bfloat16")) for v in (256, 1, 1)]
    group = Group([[0, 1, 2]])
    found = collect(lambda d, s: ncc.all_reduce([s], [d], group, nl.add), values, (1, 1))
    assert [float(result[0, 0]) for result in found] == [258.0] * 3


def test_all_gather_concatenates_in_group_order() -> None:
    expected = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    for ranks, order in (([0, 1], [0, 1, 2, 3]), ([1, 0], [2, 3, 0, 1])):
        group = Group([ranks])
        found = collect(lambda d, s, g=group: ncc.all_gather([s], [d], g, 0), RANKS, (4, 3))
        for result in found:
            np.testing.assert_array_equal(result, np.array(expected)[order])


def test_reduce_scatter_sums_and_gives_each_rank_its_part() -> None:
    group = Group([[0, 1]])
    found = collect(lambda d, s: ncc.reduce_scatter([s], [d], group, 0, nl.add), RANKS, (1, 3))
    np.testing.assert_array_equal(found[0], [[8, 10, 12]])
    np.testing.assert_array_equal(found[1], [[14, 16, 18]])


def test_all_to_all_exchanges_parts() -> None:
    group = Group([[0, 1]])
    found = collect(lambda d, s: ncc.all_to_all([s], [d], group, 0), RANKS, (2, 3))
    np.testing.assert_array_equal(found[0], [[1, 2, 3], [7, 8, 9]])
    np.testing.assert_array_equal(found[1], [[4, 5, 6], [10, 11, 12]])


def test_groups_do_not_hear_each_other() -> None:
    values = [np.full((1, 1), 10.0**rank, np.float32) for rank in range(4)]
    pairs = Group([[0, 2], [1, 3]])
    found = collect(lambda d, s: ncc.all_reduce([s], [d], pairs, nl.add), values, (1, 1))
    assert [float(result[0, 0]) for result in found] == [101, 1010, 101, 1010]


def test_several_tensors_go_in_one_call() -> None:
    group = Group([[0, 1]])

    @nki.jit
    def kernel(x: Any) -> Any:
        tiles = [nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm) for _ in range(4)]
        nisa.dma_copy(dst=tiles[0], src=x[0:1, 0:1])
        nisa.dma_copy(dst=tiles[1], src=x[0:1, 1:2])
        ncc.all_reduce(tiles[:2], tiles[2:], group, nl.add)
        return tiles[2], tiles[3]

    inputs = [[np.array([[1.0, 2.0]], np.float32)], [np.array([[10.0, 20.0]], np.float32)]]
    for first, second in nki.run_ranks(kernel, inputs):
        assert (float(first[0, 0]), float(second[0, 0])) == (11.0, 22.0)


@pytest.mark.parametrize(("dim", "shape"), [(0, (4, 3)), (1, (2, 6))])
def test_all_gather_in_sbuf_concatenates_partitions_or_columns(
    dim: int, shape: tuple[int, int]
) -> None:
    group = Group([[0, 1]])

    @nki.jit
    def kernel(x: Any) -> Any:
        tile = nl.load(x)
        dst = nl.ndarray(shape, dtype=x.dtype)
        ncc.all_gather([tile], [dst], group, dim)
        out = nl.ndarray(shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, dst)
        return out

    for result in nki.run_ranks(kernel, [[array] for array in RANKS]):
        np.testing.assert_array_equal(result, np.concatenate(RANKS, axis=dim))


def test_collective_permute_follows_its_pairs_and_leaves_others_alone() -> None:
    def body(dst: Any, src: Any) -> None:
        nisa.dma_copy(dst=dst, src=src)
        ncc.collective_permute([src], [dst], [(0, 2), (2, 1)])

    values = [np.full((1, 1), rank + 1.0, np.float32) for rank in range(4)]
    found = collect(body, values, (1, 1))
    assert [float(result[0, 0]) for result in found] == [1, 3, 1, 4]


def test_the_implicit_ring_receives_from_its_predecessor() -> None:
    ring = Group([[2, 0, 1]])
    values = [np.full((1, 1), rank, np.float32) for rank in range(3)]
    found = collect(
        lambda d, s: ncc.collective_permute_implicit([[s]], [[d]], ring), values, (1, 1)
    )
    # The successor of 2 is 0, of 0 is 1, of 1 is 2.
    assert [float(result[0, 0]) for result in found] == [2, 0, 1]


def test_the_reducing_ring_passes_on_the_sum_of_its_predecessor() -> None:
    ring = Group([[0, 1]])
    found = collect(
        lambda d, s: ncc.collective_permute_implicit_reduce([[s]], [[s]], [[d]], ring, nl.add),
        RANKS,
        (2, 3),
    )
    np.testing.assert_array_equal(found[0], 2 * RANKS[1])
    np.testing.assert_array_equal(found[1], 2 * RANKS[0])


def test_rank_ids_come_in_registers_and_address_data() -> None:
    ring = Group([[0, 1, 2]])

    @nki.jit
    def kernel(table: Any) -> Any:
        out = nl.ndarray((1, 2), dtype=table.dtype, buffer=nl.shared_hbm)
        previous = ncc.collective_permute_implicit_current_processing_rank_id(1, ring)
        for column, rank in ((0, ncc.rank_id()), (1, previous)):
            row = table.ap([[1, 1], [1, 1]], scalar_offset=rank, indirect_dim=0)
            nisa.dma_copy(dst=out[0:1, column : column + 1], src=row)
        return out

    table = np.array([[10], [11], [12]], np.int32)
    found = nki.run_ranks(kernel, [[table.copy()] for _ in range(3)])
    assert [result.tolist() for result in found] == [[[10, 12]], [[11, 10]], [[12, 11]]]


def test_all_to_all_v_sends_the_chunks_that_the_metadata_names() -> None:
    group = Group([[0, 1]])

    @nki.jit
    def kernel(x: Any, metadata: Any, dst: Any) -> Any:
        ncc.all_to_all_v([x], [dst], group, metadata)
        return dst, metadata

    x = [np.arange(6, dtype=np.float32) + 10 * rank for rank in range(2)]
    # Rows: counts, displacements, received counts (written), one column per destination.
    tables = [[[1, 3], [0, 2], [9, 9]], [[2, 0], [4, 0], [9, 9]]]
    inputs = [
        [x[rank], np.array(tables[rank], np.uint32), np.full(6, -1, np.float32)]
        for rank in range(2)
    ]
    first, second = nki.run_ranks(kernel, inputs)
    np.testing.assert_array_equal(first[0], [0, -1, -1, 14, 15, -1])
    np.testing.assert_array_equal(second[0], [2, 3, 4, -1, -1, -1])
    assert first[1][2].tolist() == [1, 2]
    assert second[1][2].tolist() == [3, 0]


def test_all_gather_v_sends_column_0_to_every_rank() -> None:
    group = Group([[0, 1, 2, 3]])

    @nki.jit
    def kernel(x: Any, metadata: Any, dst: Any) -> Any:
        ncc.all_gather_v([x], [dst], group, metadata, recv_counts_known=True)
        return dst, metadata

    def metadata(rank: int) -> Array:
        table = np.full((3, 4), 7, np.uint32)
        table[0, 0], table[1, 0] = rank % 2 + 1, rank
        return table

    x = [np.arange(6, dtype=np.float32) + 10 * rank for rank in range(4)]
    inputs = [[x[rank], metadata(rank), np.full(8, -1, np.float32)] for rank in range(4)]
    for dst, table in nki.run_ranks(kernel[2], inputs):
        np.testing.assert_array_equal(dst, [0, -1, 11, 12, 22, -1, 33, 34])
        assert table[2].tolist() == [7] * 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda d, s: ncc.all_reduce([s], [d], Group([[0, 1]]), nl.multiply), "op nl.multiply"),
        (lambda d, s: ncc.all_reduce([s], [d], Group([[0, 1], [1]]), nl.add), "overlap"),
        (lambda d, s: ncc.all_reduce([s], [d], Group([[0, 5]]), nl.add), "with 2 rank"),
        (lambda d, s: ncc.all_reduce([s], [d], Group([[1]]), nl.add), "rank 0 is in none"),
        (lambda d, s: ncc.all_reduce([s], [d, d], Group([[0, 1]]), nl.add), "1 srcs and 2 dsts"),
        (lambda d, s: ncc.all_reduce([s], [d], [[0, 1]], nl.add), "a ReplicaGroup"),
        (lambda d, s: ncc.all_reduce([s], [d], Group([[0, 1]]), nl.add, 1), "trn3 only"),
        (lambda d, s: ncc.all_gather([s], [d], Group([[0, 1]]), 1), "collective_dim 1"),
        (lambda d, s: ncc.all_gather([s], [d], Group([[0, 1]]), 0), r"has shape \(4, 3\)"),
        (lambda d, s: ncc.all_to_all([s[0:1]], [d], Group([[0, 1]]), 0), "multiple of the 2 ranks"),
        (lambda d, s: ncc.all_to_all([nl.load(s)], [d], Group([[0, 1]]), 0), "is in sbuf"),
        (lambda d, s: ncc.all_reduce([nl.load(s)], [d], Group([[0, 1]]), nl.add), "all in sbuf"),
        (lambda d, s: ncc.collective_permute([s], [d], [(0, 1), (0, 0)]), "name a source twice"),
        (lambda d, s: ncc.all_gather_v([s], [d], Group([[0, 1]]), s), "allowed: 4"),
        (
            lambda d, s: ncc.all_to_all_v([s], [d], Group([[0, 1]]), s, has_rdispls=True),
            "groups of several nodes",
        ),
        (lambda d, s: ncc.all_to_all_v([s], [d], Group([[0, 1]]), s), "uint32"),
        (
            lambda d, s: ncc.collective_permute_implicit([[s]], [[d]], Group([[0, 1]]), [1]),
            "consecutive from 0",
        ),
    ],
)
def test_what_the_documentation_restricts_is_refused(body: Any, message: str) -> None:
    with pytest.raises(NkiValidationError, match=message):
        collect(body, RANKS, (2, 3))


def test_ranks_that_call_different_collectives_deadlock_with_names() -> None:
    group = Group([[0, 1]])

    def body(dst: Any, src: Any) -> None:
        if ncc.rank_id().state == 0:
            ncc.all_reduce([src], [dst], group, nl.add)
        else:
            ncc.all_to_all([src], [dst], group, 0)

    with pytest.raises(DeadlockError, match=r"rank 0 waits in ncc.all_reduce number 0 of group"):
        collect(body, RANKS, (2, 3))


def test_the_error_of_one_rank_ends_all_and_the_next_run_works() -> None:
    group = Group([[0, 1]])

    def body(dst: Any, src: Any) -> None:
        assert ncc.rank_id().state == 0, "rank 1 fails"
        ncc.all_reduce([src], [dst], group, nl.add)

    with pytest.raises(AssertionError, match="rank 1 fails"):
        collect(body, RANKS, (2, 3))
    test_all_to_all_exchanges_parts()


def test_one_rank_alone_is_its_own_group() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        ncc.all_reduce([x], [out], Group([[0]]), nl.add)
        return out

    np.testing.assert_array_equal(kernel(RANKS[0].copy()), RANKS[0])
