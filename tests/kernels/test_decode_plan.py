"""The plan of a decode step: which runs go into which tiles, and at what cost."""

import sys
from itertools import pairwise
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from segattn.benchmarks.kernels.plan_time import step_arguments
from segattn.kernels import DecodePlan
from segattn.kernels.plan import decode_shape, work_tiles
from segattn.kernels.plan.decode_plan import DecodeLists, plan_lists
from segattn.kernels.plan.decode_step import Step
from segattn.tests.kernels.cases import Array

pytestmark = pytest.mark.usefixtures("no_garbage_collection")


def planned(
    call: decode_shape.DecodeCall,
    lengths: list[int],
    tables: Array,
    queries: list[int] | None = None,
) -> tuple[decode_shape.DecodeShape, DecodeLists]:
    """The lists of a step without a window, every request with one query."""
    shape = decode_shape.decode_shape(call)
    step = Step(
        tables, np.array(lengths), np.ones(len(lengths), np.int64), None, call.block_size,
        call.num_kv_heads, call.num_cores,
    )  # fmt: skip
    return shape, plan_lists(shape, step)


@pytest.mark.parametrize("cores", [1, 2])
def test_work_follows_the_lengths_and_two_cores_share_it_evenly(cores: int) -> None:
    """Batches with work, of a table that could hold 131072 tokens per request.

    Per KV head 4096 runs of 32 tokens, none, and 1250: 32 tiles, then 10 in which the short
    sequence has a segment of its own: some 84 on two heads, 11 batches of 8, or 6.
    """
    tables = np.arange(4 * 1024).reshape(4, 1024)
    call = decode_shape.DecodeCall(4, 2, 4, 1, 128, 128, 2, 131072, False, cores)
    shape, lists = planned(call, [131072, 5, 0, 40000], tables)
    assert (shape.tokens, shape.tiles, shape.tile_segments) == (32, 8, 1)
    assert lists.num_batches.ravel().tolist() == {1: [11], 2: [6, 6]}[cores]
    gathered = (lists.indices[..., : shape.tiles] >= 0).reshape(cores, -1).sum(1)
    assert gathered.sum() == 2 * (4096 + 1250)
    assert gathered.max() <= 1.03 * gathered.sum() / cores


@given(
    lengths=st.lists(st.integers(0, 4000), min_size=1, max_size=12),
    heads=st.integers(1, 4),
    most=st.integers(1, 8),
)
def test_both_cores_run_the_same_trips(lengths: list[int], heads: int, most: int) -> None:
    call = decode_shape.DecodeCall(len(lengths), heads, 4, 1, 128, 32, 2, 4000, False, 2)
    with mock.patch.object(decode_shape, "MOST_TILES", most):
        _, lists = planned(call, lengths, np.zeros((len(lengths), 125), np.int64))
    assert lists.num_batches[0] == lists.num_batches[1]
    assert 1 <= lists.num_batches[0, 0] <= len(lists.indices) // 2


@pytest.mark.parametrize(
    ("requests", "context", "table", "tiles"),
    [
        # 64 runs of 32 tokens: two requests fill a tile.
        (16, 2048, 2048, 8),
        # 16 runs: eight would fill one, which four may share.
        (64, 512, 512, 16),
        (1, 100, 131072, 1),
    ],
)
def test_requests_share_work_tiles(requests: int, context: int, table: int, tiles: int) -> None:
    tables = np.arange(requests * table // 32).reshape(requests, -1)
    call = decode_shape.DecodeCall(requests, 1, 8, 1, 128, 32, 2, table, False, 1)
    shape, lists = planned(call, [context] * requests, tables)
    used = (lists.indices[..., : shape.tiles] >= 0).any(1)
    assert used.sum() == tiles


@given(
    lengths=st.lists(st.integers(0, 500), max_size=12),
    tile_segments=st.integers(1, 4),
    num_cores=st.sampled_from([1, 2]),
)
def test_segments_hold_every_run_once_and_in_order(
    lengths: list[int], tile_segments: int, num_cores: int
) -> None:
    numbers, every = np.arange(len(lengths)), np.array(lengths, int)
    pieces = work_tiles.Runs(numbers, np.zeros_like(every), every)
    cores, shared = work_tiles.pack_cores(pieces, tile_segments, num_cores, True)
    assert len(cores) == num_cores
    runs: dict[int, list[int]] = {sequence: [] for sequence in range(len(lengths))}
    most = work_tiles.most_tiles(len(lengths), max(lengths, default=0), tile_segments)
    for segments in cores:
        order = segments.sequence.tolist()
        assert len(set(order)) == sum(a != b for a, b in pairwise([-1, *order]))
        assert shared not in order or order[-1] == shared
        for tile in set(segments.tile.tolist()):
            _, number, place, _, _, length = (each[segments.tile == tile] for each in segments)
            assert number.tolist() == list(range(len(number)))
            assert len(number) <= tile_segments
            assert place.tolist() == (np.cumsum(length) - length).tolist()
            assert length.sum() <= 128
            assert tile < -(-most // num_cores) + num_cores - 1
        assert (np.diff(segments.tile) >= 0).all()
        for sequence, first, length in zip(*segments[3:], strict=True):
            runs[int(sequence)] += range(first, first + length)
    assert [runs[sequence] for sequence in range(len(lengths))] == [list(range(n)) for n in lengths]
    used = np.concatenate([segments.sequence for segments in cores])
    assert set(used.tolist()) == set(range(len(lengths)))


@given(
    lengths=st.lists(st.integers(0, 130), max_size=12),
    tile_segments=st.integers(1, 4),
)
@example(lengths=[64, 64, 64], tile_segments=2)
@example(lengths=[128, 0, 1], tile_segments=2)
def test_sequences_that_are_not_cut_are_packed_as_in_turn(
    lengths: list[int], tile_segments: int
) -> None:
    every = np.array(lengths, int)
    pieces = work_tiles.Runs(np.arange(len(every)), np.zeros_like(every), every)
    packed, expected = work_tiles.pack(pieces, tile_segments), []
    tile, number, place = -1, tile_segments, 0
    for sequence, length in enumerate(lengths):
        first = 0
        while True:
            if number == tile_segments or place == 128:
                tile, number, place = tile + 1, 0, 0
            taken = min(length - first, 128 - place)
            expected.append((tile, number, place, sequence, first, taken))
            number, place, first = number + 1, place + taken, first + taken
            if first == length:
                break
    assert [*zip(*packed, strict=True)] == expected


def test_no_run_is_gathered_that_no_query_sees() -> None:
    """The runs of a plan against the definition: common tokens in tiles, others in edge runs."""
    rng = np.random.default_rng(11)
    block_size, num_queries, window = 16, 3, 40
    lengths, real = np.array([77, 200, 3, 0]), np.array([3, 1, 2, 3])
    call = decode_shape.DecodeCall(4, 2, 6, num_queries, 64, block_size, 4, 208, True, 1)
    shape = decode_shape.decode_shape(call)
    tables = rng.permutation(52).reshape(4, 13)
    lists = plan_lists(shape, Step(tables, lengths, real, window, block_size, 2, 1))
    parts = slice(shape.tiles, shape.tiles + shape.parts)
    found = [
        run * size + token
        for columns, size in ((slice(shape.tiles), shape.tokens), (parts, shape.edge_tokens))
        for run in lists.indices[..., columns][lists.indices[..., columns] >= 0].tolist()
        for token in range(size)
    ]
    needed, near = [], set()
    for table, length, queries in zip(tables, lengths, real, strict=True):
        for position in range(max(0, length - queries - window + 1), length):
            for head in range(2):
                base = (int(table[position // block_size]) * 2 + head) * block_size
                needed.append(base + position % block_size)
                run = position % block_size // shape.edge_tokens * shape.edge_tokens
                near |= set(range(base + run, base + run + shape.edge_tokens))
    assert len(found) == len(set(found))
    assert set(needed) <= set(found) <= near


def test_two_cores_share_full_requests_without_shorter_runs() -> None:
    """16 requests of 64 runs of 32 tokens: two in each of 8 tiles, and one tile for a cut."""
    calls = [decode_shape.DecodeCall(16, 1, 8, 1, 128, 32, 2, 2048, False, n) for n in (1, 2)]
    one, two = map(decode_shape.decode_shape, calls)
    assert (one.tokens, one.tile_segments, one.tiles, one.batches) == (32, 2, 8, 1)
    assert (two.tokens, two.tile_segments, two.tiles, two.batches) == (32, 2, 5, 1)


def calls_of_a_plan(requests: int) -> int:
    """Calls of Python and of C functions that make a plan for contexts of 2048 tokens."""
    arguments = step_arguments(requests, 2048, 1)
    calls = 0

    def count(frame: object, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        DecodePlan.build(*arguments)
    finally:
        sys.setprofile(None)
    return calls


def test_a_plan_takes_as_many_calls_for_64_requests_as_for_4() -> None:
    calls_of_a_plan(4)  # imports and caches
    assert calls_of_a_plan(64) == calls_of_a_plan(4)
