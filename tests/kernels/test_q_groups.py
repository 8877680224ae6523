"""Chunks of several q_groups, of which those beyond the real rows are left out at run time."""

import ml_dtypes
import numpy as np
import pytest

from segattn.kernels import padded_prefill, segmented_attention
from segattn.kernels.device.tile_schedule import core_q_groups, head_layout, passes_of
from segattn.reference import attention as reference
from segattn.reference.nki.trace import Trace
from segattn.tests.kernels.cases import Array, assert_close, garbage, padded_rows, paged_tokens

BF16 = ml_dtypes.bfloat16
ROWS, HEADS, D = 1280, 4, 32
REAL = [0, 100, 1024, 1025, 1280]


def chunk(rng: np.random.Generator, n: int) -> tuple[Array, Array, Array]:
    """q, k, v in fp32, of which 1024 rows of 4 heads are a q_group."""
    q = padded_rows(rng, HEADS, ROWS, n, D, np.float32)
    k, v = (padded_rows(rng, 1, ROWS, n, D, np.float32) for _ in range(2))
    return q, k, v


SPLITS = [(4, 1, 64, 2), (9, 3, 6, 4), (8, 1, 40, 4), (5, 5, 33, 2), (12, 3, 8, 2), (15, 3, 8, 2)]
SPLITS += [(1, 1, 1, 2), (1, 1, 3, 4), (3, 1, 9, 4), (32, 8, 16, 2), (7, 7, 64, 2)]


@pytest.mark.parametrize(("heads", "kv_heads", "tiles", "size"), SPLITS)
def test_every_row_of_every_head_is_stored_by_one_q_group(
    heads: int, kv_heads: int, tiles: int, size: int
) -> None:
    layout = head_layout((heads, tiles * 128, D), kv_heads, size)
    for cores in (1, 2):
        stored = []
        for core in range(cores):
            for group in core_q_groups(layout, core, cores):
                assert group.num_tiles <= layout.limit
                own = range(group.first_head, group.first_head + group.num_heads)
                assert {head // layout.group for head in own} == {group.kv_head}
                stored += [(h, t) for h in own for t in group.row_tiles[: group.num_stored]]
        assert sorted(stored) == [(h, t) for h in range(heads) for t in range(tiles)]


@pytest.mark.parametrize(("heads", "kv_heads", "tiles", "size"), SPLITS)
def test_two_cores_have_the_same_loops(heads: int, kv_heads: int, tiles: int, size: int) -> None:
    layout = head_layout((heads, tiles * 128, D), kv_heads, size)
    shapes = [
        [
            [(g.num_heads, len(g.row_tiles), g.first_row_tile) for g in some]
            for some in passes_of(core_q_groups(layout, core, 2), layout.limit)
        ]
        for core in (0, 1)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("softmax", ["bounded", "exact"])
@pytest.mark.parametrize("n", REAL)
def test_prefill_with_padding_q_groups_equals_the_reference(n: int, softmax: str) -> None:
    rng = np.random.default_rng(n)
    q, k, v = chunk(rng, n)
    k_cache, v_cache = (garbage(rng, (84, 1, 16, D), np.float32) for _ in range(2))
    k_wanted, v_wanted = k_cache.copy(), v_cache.copy()
    slots = np.full(ROWS, -1, np.int32)
    slots[:n] = rng.permutation(84 * 16)[:n]
    expected, *_ = reference.padded_prefill(q, k, v, k_wanted, v_wanted, slots, n)
    out, *_ = padded_prefill(q, k, v, k_cache, v_cache, slots, n, softmax=softmax)
    assert_close(out, expected)
    assert k_cache.tobytes() == k_wanted.tobytes()
    assert v_cache.tobytes() == v_wanted.tobytes()


@pytest.mark.parametrize("softmax", ["bounded", "exact"])
@pytest.mark.parametrize("n", REAL)
def test_segments_with_padding_q_groups_equal_the_reference(n: int, softmax: str) -> None:
    rng = np.random.default_rng(n)
    paged = paged_tokens(rng, [1400], 1, D, 16, np.float32, holes=0.2)
    call = (*chunk(rng, n), paged.k_cache, paged.v_cache, paged.tables[0], 1400, n)
    expected = reference.segmented_attention(*call)
    out = segmented_attention(*call, softmax=softmax, kv_segment_size=640)
    assert_close(out, expected)


@pytest.mark.parametrize("n", [1000, 1100])
def test_a_q_group_that_fails_its_check_falls_back(n: int) -> None:
    rng = np.random.default_rng(n)
    q = padded_rows(rng, 8, 1152, n, D, BF16)
    k, v = (padded_rows(rng, 1, 1152, n, D, BF16) for _ in range(2))
    q[:, n - 10 : n] *= BF16(60)
    paged = paged_tokens(rng, [700], 1, D, 16, BF16)
    call = (q, k, v, paged.k_cache, paged.v_cache, paged.tables[0], 700, n)
    with pytest.raises(FloatingPointError, match="head"):
        segmented_attention(*call, softmax="bounded")
    assert_close(segmented_attention(*call), reference.segmented_attention(*call))


def test_a_q_group_beyond_the_real_rows_costs_no_matmul() -> None:
    rng = np.random.default_rng(0)
    matmuls = []
    for n in (1000, 1100):
        q, k, v = chunk(rng, n)
        slots = np.full(ROWS, -1, np.int32)
        cache = np.zeros((2, 1, 16, D), np.float32)
        with Trace() as trace:
            padded_prefill(q, k, v, cache, cache.copy(), slots, n, softmax="bounded")
        opcodes = [getattr(record, "opcode", "") for record in trace.launches[0].records]
        matmuls.append(opcodes.count("nc_matmul"))
    assert matmuls[0] < 0.8 * matmuls[1]
