"""The calls of vLLM Neuron's models, argument by argument, against the reference."""

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.kernels import vllm_neuron
from segattn.reference import attention as reference
from segattn.tests.kernels.cases import Array, assert_close, garbage, gqa, normal, seeds

BF16 = ml_dtypes.bfloat16
D = 64


def caches_and_table(
    rng: np.random.Generator, num_kv_heads: int, block_size: int, tokens: int, padding: int
) -> tuple[Array, Array, Array]:
    """One request's cache of garbage [2, num_blocks, KV, block_size, d], its table [1, W] whose
    entries behind its blocks are `padding`, and the slots of its tokens.
    """
    blocks = -(-tokens // block_size)
    kv = garbage(rng, (2, blocks + 3, num_kv_heads, block_size, D), BF16)
    own = 1 + rng.permutation(blocks + 2)[:blocks]
    table = np.full((1, blocks + 4), padding, np.int32)
    table[0, :blocks] = own
    positions = np.arange(tokens)
    return kv, table, own[positions // block_size] * block_size + positions % block_size


@given(
    seed=seeds, heads=gqa, prior=st.integers(0, 200), rows=st.integers(1, 130),
    block_size=st.sampled_from([16, 32]), padding=st.sampled_from([0, -1]),
    tp_q=st.booleans(), tp_out=st.booleans(), window=st.sampled_from([None, 0, 50]),
    with_sink=st.booleans(),
)  # fmt: skip
def test_a_segmented_prefill(
    seed: int, heads: tuple[int, int], prior: int, rows: int, block_size: int, padding: int,
    tp_q: bool, tp_out: bool, window: int | None, with_sink: bool,
) -> None:  # fmt: skip
    """`_write_paged_kv_cache`, then `NF.segmented_attention`, in a bucket of 256 rows."""
    rng = np.random.default_rng(seed)
    bucket = 256
    kv, table, slots = caches_and_table(rng, heads[1], block_size, prior + rows, padding)
    table = np.pad(table, ((0, 0), (0, -(-bucket // block_size))), constant_values=padding)
    k, v = (normal(rng, (heads[1], prior + rows, D), BF16) for _ in range(2))
    k_cache, v_cache = kv[0], kv[1]
    null = kv[:, 0].tobytes()
    if prior:
        vllm_neuron.write_paged_kv_cache(
            k[:, :prior], v[:, :prior], k_cache, v_cache, slots[:prior].astype(np.int64), block_size
        )
    chunk = np.full(bucket, padding, np.int64)
    chunk[:rows] = slots[prior:]
    own = []
    for each in (k, v):
        padded = garbage(rng, (bucket, heads[1], D), BF16)
        padded[:rows] = each[:, prior:].swapaxes(0, 1)
        own.append(padded.swapaxes(0, 1))
    vllm_neuron.write_paged_kv_cache(own[0], own[1], k_cache, v_cache, chunk, block_size)
    assert kv[:, 0].tobytes() == null
    q = garbage(rng, (bucket, heads[0], D), BF16)
    q[:rows] = normal(rng, (rows, heads[0], D), BF16)
    sink = rng.uniform(-3, 3, (heads[0], 1)).astype(np.float32) if with_sink else None
    queries = q.swapaxes(0, 1)
    out = vllm_neuron.segmented_attention(
        queries if tp_q else queries.swapaxes(1, 2), k_cache=k_cache, v_cache=v_cache,
        block_tables=table, prior_tokens=np.array([[prior]], np.int32), block_size=block_size,
        kv_segment_size=256, scale=0.11, tp_q=tp_q, tp_out=tp_out, sliding_window=window,
        sink=sink, fp8_packed=False, k_scale=None, v_scale=None,
    )  # fmt: skip
    out = out.swapaxes(1, 2) if tp_out else out
    empty = np.zeros((0, heads[1], 16, D))
    every = np.zeros((heads[0], prior + rows, D))
    every[:, prior:] = queries[:, :rows]
    expected = reference.segmented_attention(
        every, k, v, empty, empty, np.zeros(0, np.int32), 0, prior + rows, scale=0.11,
        sliding_window=window or None, sinks=None if sink is None else sink.ravel(),
    )  # fmt: skip
    assert out.shape == (heads[0], bucket, D)
    assert_close(np.ascontiguousarray(out[:, :rows]), expected[:, prior:])


@given(
    seed=seeds, heads=gqa, lengths=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    num_queries=st.integers(1, 3), padding=st.sampled_from([0, -1]),
    scale=st.sampled_from([None, 4.0]), window=st.sampled_from([None, 30]),
    wide=st.booleans(), data=st.data(),
)  # fmt: skip
def test_a_decode(
    seed: int, heads: tuple[int, int], lengths: list[int], num_queries: int, padding: int,
    scale: float | None, window: int | None, wide: bool, data: st.DataObject,
) -> None:  # fmt: skip
    """Requests of some cached tokens and 1 .. T new ones, and a dummy request behind them."""
    rng = np.random.default_rng(seed)
    block_size, batch = 16, len(lengths) + 1
    counts = [data.draw(st.integers(1, num_queries)) for _ in lengths] + [0]
    width = 8
    dtype = BF16 if scale is None else ml_dtypes.float8_e4m3fn
    kv = garbage(rng, (2, 1 + batch * width, heads[1], block_size, D), dtype)
    table = np.full((batch, width), padding, np.int32)
    positions = np.zeros((batch, num_queries), np.int64)
    pad_slot = 0xFFFFFFFF if padding == -1 else 0
    slots = np.full((batch, num_queries), pad_slot, np.int64)
    rows = [garbage(rng, (batch, num_queries, n, D), BF16) for n in (heads[0], *heads[1:] * 2)]
    blocks = 1 + rng.permutation(batch * width)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=False)):
        needed = -(-(length + count) // block_size)
        own = blocks[request * width : request * width + needed]
        table[request, :needed] = own
        cached = np.arange(length)
        where = own[cached // block_size], slice(None), cached % block_size
        for cache in kv:
            cache[where] = normal(rng, (length, heads[1], D), dtype)
        new = np.arange(length, length + count)
        positions[request, :count] = new
        slots[request, :count] = own[new // block_size] * block_size + new % block_size
        for each in rows:
            each[request, :count] = normal(rng, each[request, :count].shape, BF16)
    q, k, v = (each.reshape(-1, *each.shape[2:]) for each in rows)
    right, null = kv.copy(), kv[:, 0].tobytes()
    out = vllm_neuron.decode_attention(
        q, k, v, kv[0], kv[1], active_blocks_table=table.astype(np.int64) if wide else table,
        positions=positions.ravel(),
        kv_cache_update_idx=slots.astype(np.uint32) if wide else slots.ravel(),
        softmax_scale=0.13, sliding_window=window, k_scale=scale, v_scale=scale,
    )  # fmt: skip
    real = np.arange(num_queries) < np.array(counts)[:, None]
    own_slots = np.where(real, slots, -1).ravel()
    factors: dict[str, Any] = {} if scale is None else {"k_scale": 1 / scale, "v_scale": 1 / scale}
    reference.write_kv_cache(
        k.swapaxes(0, 1), v.swapaxes(0, 1), right[0], right[1], own_slots, **factors
    )
    assert kv.tobytes() == right.tobytes()
    assert kv[:, 0].tobytes() == null
    expected = reference.paged_decode(
        rows[0].swapaxes(1, 2), right[0], right[1], np.where(table == 0, -1, table),
        np.array([*(a + b for a, b in zip(lengths, counts, strict=False)), 0]),
        query_lens=np.array(counts), scale=0.13, sliding_window=window, **factors,
    )  # fmt: skip
    assert_close(out, expected.swapaxes(1, 2).reshape(q.shape))


def test_rows_that_the_shipped_runner_mixes_up_are_refused() -> None:
    zeros: Any = np.zeros
    call = [zeros((4, 2, D), BF16), zeros((4, 1, D), BF16), zeros((4, 1, D), BF16)]
    caches = zeros((2, 4, 1, 16, D), BF16)
    tables = np.array([[1], [2]], np.int32)
    with pytest.raises(ValueError, match=r"positions\[1\]=\[0, 7\]: must follow each other"):
        vllm_neuron.decode_attention(
            call[0], call[1], call[2], caches[0], caches[1], tables, np.array([3, 4, 0, 7]),
            np.array([19, 20, 0, 39]), softmax_scale=1.0,
        )  # fmt: skip
    assert not caches.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sink": np.zeros(7, np.float32)}, r"sinks: shape \(7,\) must be \(2\)"),
        ({"softmax_scale": 0.0}, "scale=0.0: must be within"),
        ({"v_scale": 1e9}, "v_scale=.*e-10: must be within"),
        ({"active_blocks_table": np.array([[9]], np.int32)}, r"block_tables\[0, 0\]=9: must be"),
        ({"sliding_window": -1}, "sliding_window=-1: must be at least 1"),
        ({"lnc": 3}, "lnc=3: must be one of 1, 2"),
        ({"k": np.ones((1, 1, 32), BF16)}, "k"),
    ],
)
def test_a_refused_decode_has_written_nothing(change: dict[str, Any], message: str) -> None:
    kv = np.ones((2, 3, 1, 16, D), BF16)
    row = np.full((1, 1, D), 2, BF16)
    given = {
        "q": np.ones((1, 2, D), BF16), "k": row, "v": row, "k_cache": kv[0], "v_cache": kv[1],
        "active_blocks_table": np.array([[1]], np.int32), "positions": np.array([[4]]),
        "kv_cache_update_idx": np.array([20]),
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        vllm_neuron.decode_attention(**{**given, **change})
    assert (kv == 1).all()
    vllm_neuron.decode_attention(**given)
    assert (kv[:, 1, 0, 4] == 2).all()


def test_the_names_are_those_of_the_shipped_calls() -> None:
    assert [*inspect.signature(vllm_neuron.segmented_attention).parameters] == [
        "q", "k_cache", "v_cache", "block_tables", "prior_tokens", "block_size",
        "kv_segment_size", "scale", "tp_q", "tp_out", "sliding_window", "sink", "fp8_packed",
        "k_scale", "v_scale", "lnc",
    ]  # fmt: skip
