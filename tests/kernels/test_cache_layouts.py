"""Caches that are views of larger buffers: read and written where they lie, and nothing else."""

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn import kernels
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import (
    Array,
    Options,
    assert_close,
    assert_same_rows,
    block_sizes,
    dtypes,
    garbage,
    gqa,
    normal,
    options,
    padded_rows,
    paged_tokens,
    seeds,
)

BF16 = ml_dtypes.bfloat16
HEADS_FIRST = ["interleaved", "reversed", "one of three layers"]
TOKENS_FIRST = ["NHD", "interleaved NHD", "NHD of one of three layers"]


def laid_out(
    rng: np.random.Generator, caches: tuple[Array, Array], layout: str
) -> tuple[Array, Array, Array]:
    """Views with the values of two caches of one shape, and the buffer of garbage they lie in."""
    num_blocks, *page = caches[0].shape
    if layout in TOKENS_FIRST:
        page[0], page[1] = page[1], page[0]
    shape = {
        "interleaved": (num_blocks, 2, *page),
        "reversed": (num_blocks, 2, *page),
        "one of three layers": (num_blocks, 3, 2, *page),
        "NHD": (2, num_blocks, *page),
        "interleaved NHD": (num_blocks, 2, *page),
        "NHD of one of three layers": (num_blocks, 3, 2, *page),
    }[layout]
    buffer = garbage(rng, shape, caches[0].dtype)
    if layout == "NHD":
        views = buffer[0], buffer[1]
    elif "three" in layout:
        views = buffer[:, 1, 0], buffer[:, 1, 1]
    else:
        views = buffer[:, 0], buffer[:, 1]
    if layout == "reversed":
        views = views[0][::-1], views[1][::-1]
    if layout in TOKENS_FIRST:
        views = views[0].swapaxes(1, 2), views[1].swapaxes(1, 2)
    for view, cache in zip(views, caches, strict=True):
        view[...] = cache
    return *views, buffer


def layouts(option: Options) -> st.SearchStrategy[str]:
    """Those that the options allow: the columns of a head are one piece."""
    return st.sampled_from(HEADS_FIRST + ([] if option.k_pre_transposed else TOKENS_FIRST))


def views_of(
    rng: np.random.Generator, option: Options, k_cache: Array, v_cache: Array, layout: str
) -> tuple[Array, Array, list[Array]]:
    """The caches of a call, and the buffers they lie in."""
    if not option.k_pre_transposed:
        keys, values, buffer = laid_out(rng, (k_cache, v_cache), layout)
        return keys, values, [buffer]
    columns = option.stored_keys(k_cache)
    keys, _, own = laid_out(rng, (columns, columns), layout)
    _, values, others = laid_out(rng, (v_cache, v_cache), layout)
    return keys, values, [own, others]


@given(
    seed=seeds, heads=gqa, block_size=block_sizes, dtype=dtypes, option=options, data=st.data()
)  # fmt: skip
def test_reads_equal_the_reference(
    seed: int, heads: tuple[int, int], block_size: int, dtype: npt.DTypeLike, option: Options,
    data: st.DataObject,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    layout = data.draw(layouts(option))
    lengths = [270, 33]
    paged = paged_tokens(
        rng, lengths, heads[1], 64, block_size, option.cache_dtype(dtype), holes=0.1
    )
    keys, values, buffers = views_of(rng, option, paged.k_cache, paged.v_cache, layout)
    before = [buffer.tobytes() for buffer in buffers]
    named = {**option.arguments(rng, heads[0]), **option.scales(rng, heads[1], dtype)}
    q = normal(rng, (2, heads[0], 1, 64), dtype)
    decode = (q, keys, values, paged.tables, np.array(lengths, np.int32))
    assert_close(kernels.paged_decode(*decode, **named), reference.paged_decode(*decode, **named))
    q, k, v = (padded_rows(rng, n, 100, 90, 64, dtype) for n in (heads[0], heads[1], heads[1]))
    chunk = (q, k, v, keys, values, paged.tables[0], lengths[0], 90)
    expected = reference.segmented_attention(*chunk, **named)
    found = kernels.segmented_attention(*chunk, kv_segment_size=256, **named)
    assert_close(found[:, :90], expected[:, :90])
    assert [buffer.tobytes() for buffer in buffers] == before
    for launch, first in (
        (kernels.prepare_paged_decode(*decode, **named), 1),
        (kernels.prepare_segmented_attention(*chunk, **named), 3),
    ):
        assert np.shares_memory(launch.arrays[first], keys)
        assert np.shares_memory(launch.arrays[first + 1], values)


@given(
    seed=seeds, heads=gqa, block_size=block_sizes, dtype=dtypes, option=options,
    in_order=st.booleans(), data=st.data(),
)  # fmt: skip
def test_writes_change_the_slots_and_nothing_else(
    seed: int, heads: tuple[int, int], block_size: int, dtype: npt.DTypeLike, option: Options,
    in_order: bool, data: st.DataObject,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    layout, n = data.draw(layouts(option)), 90
    num_blocks = -(-n // block_size) + 2
    shape = (num_blocks, heads[1], block_size, 64)
    caches = [garbage(rng, shape, option.cache_dtype(dtype)) for _ in range(2)]
    slots = np.full(100, -1, np.int32)
    slots[:n] = rng.permutation(num_blocks * block_size)[:n]
    if in_order:
        slots[:n] = np.arange(n) + int(rng.integers(0, block_size))
    q, k, v = (padded_rows(rng, each, 100, n, 64, dtype) for each in (heads[0], *heads[1:] * 2))
    named = {**option.arguments(rng, heads[0]), **option.scales(rng, heads[1], dtype)}
    of_write = option.scales(rng, heads[1], dtype)
    named |= of_write
    right = [option.stored_keys(caches[0]).copy(), caches[1].copy()]
    expected, *_ = reference.padded_prefill(q, k, v, right[0], right[1], slots, n, **named)
    for prefills in (True, False):
        keys, values, buffers = views_of(rng, option, caches[0], caches[1], layout)
        before = [buffer.copy() for buffer in buffers]
        if prefills:
            out, *_ = kernels.padded_prefill(q, k, v, keys, values, slots, n, **named)
            assert_close(out[:, :n], expected[:, :n])
        else:
            kernels.write_kv_cache(k, v, keys, values, slots, **of_write)
        assert_same_rows(np.ascontiguousarray(keys), right[0])
        assert_same_rows(np.ascontiguousarray(values), right[1])
        keys[...], values[...] = 0, 0
        for buffer, old in zip(buffers, before, strict=True):
            others = buffer.view(f"u{buffer.itemsize}") != 0
            assert buffer[others].tobytes() == old[others].tobytes()


def test_rows_with_a_gap_are_copied_to_be_read_and_refused_to_be_written() -> None:
    rng = np.random.default_rng(0)
    paged = paged_tokens(rng, [40], 2, 64, 16, BF16)
    wide = garbage(rng, (*paged.k_cache.shape[:3], 80), BF16)
    keys = wide[..., :64]
    keys[...] = paged.k_cache
    q = normal(rng, (1, 4, 1, 64), BF16)
    call = (q, keys, paged.v_cache, paged.tables, np.array([40], np.int32))
    assert_close(kernels.paged_decode(*call), reference.paged_decode(*call))
    rows, before = normal(rng, (2, 3, 64), BF16), wide.tobytes()
    with pytest.raises(ValueError, match=r"k_cache: strides .* must be those of blocks"):
        kernels.write_kv_cache(rows, rows, keys, paged.v_cache, np.array([1, 2, 3], np.int32))
    assert wide.tobytes() == before


def test_caches_that_are_written_have_one_layout() -> None:
    buffer = np.zeros((6, 2, 2, 16, 64), BF16)
    rows, slots = np.ones((2, 3, 64), BF16), np.array([1, 2, 3], np.int32)
    other = np.zeros((6, 2, 16, 64), BF16)
    with pytest.raises(ValueError, match=r"v_cache: strides .* must be those of k_cache"):
        kernels.write_kv_cache(rows, rows, buffer[:, 0], other, slots)
    shared = np.broadcast_to(other[:1], other.shape)
    with pytest.raises(ValueError, match="k_cache: is read-only"):
        kernels.write_kv_cache(rows, rows, shared, other, slots)
    assert not buffer.any()
    assert not other.any()


def test_a_plan_serves_caches_of_its_layout_only() -> None:
    rng = np.random.default_rng(0)
    buffer = normal(rng, (6, 2, 2, 16, 64), BF16)
    q, tables = normal(rng, (1, 4, 1, 64), BF16), np.array([[3, 1]], np.int32)
    lengths = np.array([20], np.int32)
    plan = kernels.DecodePlan.build(q, buffer[:, 0], buffer[:, 1], tables, lengths)
    expected = reference.paged_decode(q, buffer[:, 0], buffer[:, 1], tables, lengths)
    assert_close(kernels.paged_decode(q, buffer[:, 0], buffer[:, 1], plan=plan), expected)
    for other in (buffer[::-1], np.ascontiguousarray(buffer.swapaxes(0, 1)).swapaxes(0, 1)):
        with pytest.raises(ValueError, match="plan: made for"):
            kernels.paged_decode(q, other[:, 0], other[:, 1], plan=plan)


def test_pre_transposed_blocks_are_numbers_that_fp32_holds() -> None:
    cache = np.zeros((2**23, 2, 32, 1), ml_dtypes.float8_e4m3)
    rows, values = np.ones((2, 1, 32), BF16), cache.reshape(2**23, 2, 1, 32)
    with pytest.raises(ValueError, match="8388608 pre-transposed blocks of 2 KV heads must be"):
        kernels.write_kv_cache(
            rows, rows, cache, values, np.array([0], np.int32), k_scale=1.0, v_scale=1.0,
            k_pre_transposed=True,
        )  # fmt: skip
