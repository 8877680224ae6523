"""Every argument outside the supported range: a ValueError that names it, nothing written."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn import kernels
from segattn.reference.attention import Array

H, KV, S, D, BLOCKS, BLOCK = 4, 2, 128, 64, 6, 16


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def prefill() -> dict[str, Any]:
    """A valid call of padded_prefill."""
    slots = np.full(S, -1, np.int32)
    slots[:3] = [4, 5, 6]
    return {
        "q": zeros(H, S, D), "k": zeros(KV, S, D), "v": zeros(KV, S, D),
        "k_cache": zeros(BLOCKS, KV, BLOCK, D), "v_cache": zeros(BLOCKS, KV, BLOCK, D),
        "slot_mapping": slots, "num_tokens": 3,
    }  # fmt: skip


def segmented() -> dict[str, Any]:
    """A valid call of segmented_attention."""
    call = prefill()
    del call["slot_mapping"]
    return {**call, "block_table": ints(3, 1, -1), "prior_tokens": 20}


def decode() -> dict[str, Any]:
    """A valid call of paged_decode."""
    return {
        "q": zeros(2, H, 1, D), "k_cache": zeros(BLOCKS, KV, BLOCK, D),
        "v_cache": zeros(BLOCKS, KV, BLOCK, D),
        "block_tables": np.stack([ints(3, 1), ints(-1, -1)]),
        "context_lens": ints(20, 0),
    }  # fmt: skip


def write() -> dict[str, Any]:
    """A valid call of write_kv_cache."""
    call = prefill()
    return {name: call[name] for name in ("k", "v", "k_cache", "v_cache", "slot_mapping")}


def slots(*first: int) -> Array:
    mapping = np.full(S, -1, np.int32)
    mapping[: len(first)] = first
    return mapping


EVERYWHERE: list[tuple[str, Any, str]] = [
    ("v_cache", zeros(5, KV, BLOCK, D), r"v_cache: shape .* must be \(6, 2, 16, 64\)"),
    ("k_cache", zeros(BLOCKS, 3, BLOCK, D), "_cache: shape"),
    ("k_cache", np.zeros((BLOCKS, KV, BLOCK, D)), "k_cache: dtype float64 must be float32"),
    ("k_cache", [1.0], "k_cache: list must be a NumPy, torch or JAX array"),
]
ATTENTION: list[tuple[str, Any, str]] = [
    ("scale", 0.0, "scale=0.0: must be within 1e-12..1e"),
    ("scale", float("nan"), "scale=nan: must be within 1e-12..1e"),
    ("scale", 1e-60, "scale=1e-60: must be within 1e-12..1e"),
    ("scale", 1e60, r"scale=1e\+60: must be within 1e-12..1e"),
    ("scale", 10**400, "scale=1000*: must be a number, or None"),
    ("scale", "half", "scale='half': must be a number, or None"),
    ("scale", "0.125", "scale='0.125': must be a number, or None"),
    ("scale", zeros(2), "scale=array.*: must be a number, or None"),
    ("softcap", "30", "softcap='30': must be a number"),
    ("softcap", None, "softcap=None: must be a number"),
    ("softcap", -30.0, "softcap=-30.0: must be 0 or within 0.01..1000"),
    ("softcap", float("nan"), "softcap=nan: must be 0 or within 0.01..1000"),
    ("softcap", 1001, "softcap=1001: must be 0 or within 0.01..1000"),
    ("softmax", "fast", "softmax='fast': must be one of auto, "),
    ("lnc", 3, "lnc=3: must be one of 1, 2"),
    ("lnc", 1.0, "lnc=1.0: must be an integer"),
    ("sliding_window", 0, "sliding_window=0: must be at least 1, or None"),
    ("sliding_window", 2.5, "sliding_window=2.5: must be an integer"),
    ("sinks", zeros(3), r"sinks: shape \(3,\) must be \(4\)"),
    ("sinks", 1.0, r"sinks: shape \(\) must be \(4\)"),
    ("sinks", np.zeros(H), "sinks: dtype float64 must be float32"),
    ("sinks", zeros(H) + np.inf, "sinks=.* must be below infinity"),
    ("sinks", zeros(H) * np.nan, "sinks=.* must be below infinity"),
]
SCALES: list[tuple[str, Any, str]] = [
    ("k_scale", 0.0, "k_scale=0.0: must be within 1e-06..1e"),
    ("v_scale", -0.5, "v_scale=-0.5: must be within 1e-06..1e"),
    ("k_scale", "a", r"k_scale=a: must be a number or \[2\]"),
    ("v_scale", ["1", "2"], r"v_scale=.*: must be a number or \[2\]"),
    ("k_scale", {}, r"k_scale={}: must be a number or \[2\]"),
    ("k_scale", 10**400, r"k_scale=1000*: must be a number or \[2\]"),
    ("v_scale", [[1.0], [1.0, 2.0]], r"v_scale=.*: must be a number or \[2\]"),
    ("v_scale", np.ones(KV, complex), r"v_scale=.*: must be a number or \[2\]"),
    ("k_scale", float("nan"), "k_scale=nan: must be within 1e-06..1e"),
    ("v_scale", zeros(3), r"v_scale: shape \(3,\) must be \(\) or \(2,\)"),
]
CHUNK: list[tuple[str, Any, str]] = [
    ("q", zeros(H, 100, D), "k: shape .* must be"),
    ("q", zeros(3, S, D), "num_q_heads=3 must be a positive multiple of num_kv_heads=2"),
    ("k", zeros(KV, S, 32), "k: shape"),
    ("v", zeros(1, S, D), "v: shape"),
    ("v", np.zeros((KV, S, D), np.float16), "v: dtype float16 must be float32"),
    ("num_tokens", -1, "num_tokens=-1: must be within 0..128"),
    ("num_tokens", 129, "num_tokens=129: must be within 0..128"),
    ("num_tokens", 2.5, "num_tokens=2.5: must be an integer"),
]
SLOTS: list[tuple[str, Any, str]] = [
    ("v_cache", zeros(BLOCKS, KV, BLOCK, 32), r"v_cache: shape .* must be \(6, 2, 16, 64\)"),
    ("slot_mapping", slots(96), r"slot_mapping\[0\]=96: must be -1 or within 0..95"),
    ("slot_mapping", slots(0, -2), r"slot_mapping\[1\]=-2: must be -1 or within 0..95"),
    ("slot_mapping", slots(7, 3, 7), "slot 7 occurs twice"),
    ("slot_mapping", slots(1)[:5], r"slot_mapping: shape \(5,\) must be \(128\)"),
    ("slot_mapping", slots(1).astype(np.int16), "slot_mapping: dtype int16 must be int32, uint32"),
    (
        "slot_mapping",
        slots(1).astype(np.int64) + 2**32,
        r"slot_mapping\[0\]=4294967297: must be within int32",
    ),
    ("k_cache", read_only(zeros(BLOCKS, KV, BLOCK, D)), "k_cache: .* writeable"),
    (
        "v_cache",
        zeros(BLOCKS, KV, D, BLOCK).transpose(0, 1, 3, 2),
        "v_cache: strides .* must be those of blocks",
    ),
]
PRIOR: list[tuple[str, Any, str]] = [
    ("v_cache", zeros(BLOCKS, KV, BLOCK, 32), r"v_cache: shape .* must be \(6, 2, 16, 64\)"),
    ("prior_tokens", -1, "prior_tokens=-1: must be within 0..48"),
    ("prior_tokens", 49, "prior_tokens=49: must be within 0..48"),
    ("block_table", ints(3, 6), r"block_table\[0, 1\]=6: must be -1 or within 0..5"),
    ("block_table", ints(3, -2), r"block_table\[0, 1\]=-2: must be -1 or within 0..5"),
    ("block_table", np.array([3, 2**32 + 1]), r"block_table\[1\]=4294967297: must be within int32"),
    ("kv_segment_size", 100, "kv_segment_size=100: must be a positive multiple of 128"),
    ("kv_segment_size", 0, "kv_segment_size=0: must be a positive multiple of 128"),
]
DECODE: list[tuple[str, Any, str]] = [
    ("softmax", "bounded", "softmax='bounded': must be one of auto, exact"),
    ("q", zeros(2, H, D), r"q: shape \(2, 4, 64\) must be \(B, H, T, d\)"),
    ("q", zeros(2, H, 65, D), "q: 2 query heads per KV head times T=65 must be at most 128"),
    ("q", zeros(2, 3, 1, D), "num_q_heads=3 must be a positive multiple of num_kv_heads=2"),
    ("query_lens", ints(0, 2), r"query_lens\[1\]=2: must be within 0..1"),
    ("query_lens", 1, r"query_lens: shape \(\) must be \(2\)"),
    ("query_lens", ints(1), r"query_lens: shape \(1,\) must be \(2\)"),
    ("context_lens", ints(33, 0), r"context_lens\[0\]=33: must be within 0..32"),
    ("context_lens", ints(-1, 0), r"context_lens\[0\]=-1: must be within 0..32"),
    ("block_tables", np.stack([ints(3, 6), ints(0, 0)]), r"block_tables\[0, 1\]=6: must be"),
    ("block_tables", ints(3, 1), r"block_tables: shape \(2,\) must be \(2, any\)"),
]
GEOMETRY: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 44}, "head_dim=44: must be a multiple of 8 within 32.."),
    ({"head_dim": 584}, "head_dim=584: must be a multiple of 8 within 32.."),
    ({"block_size": 512}, r"block_size .*=512: must be one of 1, 2, 4, 8, 16, 32, 64, 128, 256"),
    ({"block_size": 24}, r"block_size .*=24: must be one of 1, 2, 4, 8, 16, 32, 64, 128, 256"),
    ({"dtype": np.float64}, "dtype of q, k, v=.*float64.* must be one of float32"),
]

CASES = [
    (function, make, name, value, message)
    for function, make, rejected in (
        (kernels.padded_prefill, prefill, EVERYWHERE + ATTENTION + SCALES + CHUNK + SLOTS),
        (kernels.segmented_attention, segmented, EVERYWHERE + ATTENTION + SCALES + CHUNK + PRIOR),
        (kernels.paged_decode, decode, EVERYWHERE + ATTENTION + SCALES + DECODE),
        (kernels.write_kv_cache, write, EVERYWHERE + SCALES + SLOTS),
    )
    for name, value, message in rejected
]


def check_rejected(function: Callable[..., Any], call: dict[str, Any], message: str) -> None:
    """The call raises ValueError with the message and leaves every array as it was."""
    arrays = {name: value for name, value in call.items() if isinstance(value, np.ndarray)}
    before = {name: array.tobytes() for name, array in arrays.items()}
    with pytest.raises(ValueError, match=message):
        function(**call)
    assert {name: array.tobytes() for name, array in arrays.items()} == before


@pytest.mark.parametrize(
    ("function", "make", "name", "value", "message"),
    CASES,
    ids=[f"{case[0].__name__}-{case[2]}-{index}" for index, case in enumerate(CASES)],
)
def test_a_bad_argument_is_named(
    function: Callable[..., Any],
    make: Callable[[], dict[str, Any]],
    name: str,
    value: Any,
    message: str,
) -> None:
    check_rejected(function, {**make(), name: value}, message)


@pytest.mark.parametrize(
    ("function", "make"),
    [
        (kernels.padded_prefill, prefill),
        (kernels.segmented_attention, segmented),
        (kernels.paged_decode, decode),
        (kernels.write_kv_cache, write),
    ],
)
@pytest.mark.parametrize(("change", "message"), GEOMETRY)
def test_an_unsupported_geometry_is_named(
    function: Callable[..., Any], make: Callable[[], dict[str, Any]], change: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    call = make()
    for name, array in call.items():
        if isinstance(array, np.ndarray) and array.dtype == np.float32:
            shape = [*array.shape[:-1], change.get("head_dim", D)]
            if name.endswith("cache"):
                shape[2] = change.get("block_size", BLOCK)
            call[name] = np.zeros(shape, change.get("dtype", np.float32))
    check_rejected(function, call, message)


def test_a_chunk_that_exceeds_the_memory_on_chip_is_refused() -> None:
    q = np.zeros((1, 16512, D), np.float32)
    cache = zeros(BLOCKS, 1, BLOCK, D)
    with pytest.raises(ValueError, match="q: S=16512 must be at most 8192"):
        kernels.segmented_attention(q, q, q, cache, cache, ints(0), 0, 1)


def test_a_cache_write_beyond_one_program_is_refused() -> None:
    cache = zeros(BLOCKS, 1, BLOCK, D)
    rows = zeros(1, 70001, D)
    with pytest.raises(ValueError, match="k: T=70001 must be at most 70000 for 1 KV heads"):
        kernels.write_kv_cache(rows, rows, cache, cache, np.full(70001, -1, np.int32))
    wide, cache = zeros(257, 1, D), zeros(BLOCKS, 257, BLOCK, D)
    with pytest.raises(ValueError, match="k: 257 KV heads of head_dim=64 must have at most 16384"):
        kernels.write_kv_cache(wide, wide, cache, cache, ints(-1))


@pytest.mark.parametrize("function", [kernels.padded_prefill, kernels.write_kv_cache])
def test_caches_that_share_memory_are_refused(function: Callable[..., Any]) -> None:
    call = prefill() if function is kernels.padded_prefill else write()
    call["v_cache"] = call["k_cache"]
    check_rejected(function, call, "v_cache: shares memory with k_cache")


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize(
    ("function", "make", "name"),
    [
        (kernels.padded_prefill, prefill, "q"),
        (kernels.padded_prefill, prefill, "k"),
        (kernels.write_kv_cache, write, "k"),
        (kernels.write_kv_cache, write, "v"),
    ],
)
def test_rows_in_the_memory_of_a_cache_that_is_written_are_rejected(
    function: Callable[..., Any], make: Callable[[], dict[str, Any]], name: str, cache: str
) -> None:
    call = make()
    shape = zeros(H, S, D).shape if name == "q" else call["k"].shape
    call["k_cache"], call["v_cache"] = zeros(2, 64, KV, BLOCK, D)
    call[name] = call[cache].reshape(-1)[: int(np.prod(shape))].reshape(shape)
    check_rejected(function, call, f"{name}: shares memory with a cache")


def test_slots_of_another_block_size_are_refused_with_both_sizes() -> None:
    # 16384 pages of 4 tokens seen by a caller that counts blocks of 16 (published fault).
    call = {**write(), "slot_mapping": slots(62650, 75849)}
    check_rejected(kernels.write_kv_cache, call, r"6 blocks of block_size=16")


@pytest.mark.parametrize(
    ("function", "make"),
    [(kernels.padded_prefill, prefill), (kernels.paged_decode, decode),
     (kernels.write_kv_cache, write)],
)  # fmt: skip
def test_an_fp8_cache_needs_scales_and_16_bit_queries(
    function: Callable[..., Any], make: Callable[[], dict[str, Any]]
) -> None:
    fp8 = {
        name: np.zeros((BLOCKS, KV, BLOCK, D), ml_dtypes.float8_e4m3fn)
        for name in ("k_cache", "v_cache")
    }
    check_rejected(function, {**make(), **fp8}, "k_cache: dtype float8_e4m3fn must be float32")
    half = {
        name: array.astype(np.float16)
        for name, array in make().items()
        if isinstance(array, np.ndarray) and array.dtype == np.float32
    }
    check_rejected(function, {**make(), **half, **fp8}, "k_scale=None: a cache of float8_e4m3fn")
