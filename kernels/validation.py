"""Checks of a kernel call on the host, before a byte moves; slots and tables: addresses.py.

Every failure is a ValueError that names the argument, its value and what is allowed.
"""

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..reference.attention import queries_per_kv_head
from .sizes import PARTITIONS

Array = npt.NDArray[Any]

DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))
FP8_DTYPES = tuple(np.dtype(t) for t in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn))
QUANTISED_DTYPES = (*FP8_DTYPES, np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.int8))
"""Caches of one byte, which need scales."""
HEAD_DIMS = range(32, 257, 8)
DECODE_KEY_DIMS, DECODE_VALUE_DIMS = range(32, 577, 8), range(32, 513, 8)
"""Those of paged_decode: MLA has keys of 576 features and values of 512."""
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MOST_COLUMN_BLOCKS = 2**24
"""Pre-transposed blocks are found by numbers that fp32 must hold."""
CHUNK_BYTES = 4 << 20
"""Most bytes of a head's keys in a chunk, which stay in SBUF: S = 8192 with 128 fp32 features. More
than 128 features take the room of 256."""
BOUNDED_CHUNK_BYTES = 2 << 20
"""The same with softmax="bounded"."""
MOST_ROWS = 8192
"""Longest chunk: the program of one head has below 20,000 instructions then."""
MOST_WRITTEN_ROWS = 350_000
"""Most tokens times (KV heads + 4) of write_kv_cache: rows of the chunk are exact in fp32, and the
program has below 60,000 instructions where pre-transposed keys follow each other in blocks."""
WIDEST_TOKEN = 16384
"""Most elements of a token's K in all heads: with scales SBUF holds 128 tokens in three forms."""
FEW_TOKENS = 512
"""Where a context cannot reach so many tokens, softmax="auto" takes the exact softmax: it costs few
microseconds there, and the error of no call is above that of an exact maximum."""
SMALLEST_SCALE = 1e-6
SOFTMAX_SCALES = (1e-12, 1e6)
"""Beyond them the scale times softmax.FLOOR, or a sink divided by it, leaves fp32."""
SOFTCAPS = (1e-2, 1e3)
"""Models cap at 20 to 50. Capped scores have an error of 2^-23 of the cap in fp32."""
LONGEST_WINDOW = 2**31 - 1
"""More than any cache holds: longer windows are this one."""
SOFTMAX_MODES = ("auto", "bounded", "exact")


def check_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """`value` is one of `allowed`."""
    if isinstance(value, np.ndarray) or value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(str, allowed))}")


def check_shape(name: str, array: Array, expected: tuple[int | None, ...], axes: str = "") -> None:
    """`array` has the expected shape; None stands for any size of at least 1.

    `axes` names them in the message, as in "B, H, T, d".
    """
    fits = array.ndim == len(expected) and all(
        size >= 1 if want is None else size == want
        for size, want in zip(array.shape, expected, strict=True)
    )
    if not fits:
        names = axes.split(", ") if axes else ["any"] * len(expected)
        wanted = ", ".join(
            name if want is None else str(want) for name, want in zip(names, expected, strict=True)
        )
        least = ", each at least 1" if None in expected and array.ndim == len(expected) else ""
        raise ValueError(f"{name}: shape {array.shape} must be ({wanted}){least}")


def check_integers(name: str, array: Array, expected: tuple[int | None, ...]) -> Array:
    """An int32, uint32 or int64 array of the expected shape, as int32.

    ValueError for another dtype, and for a number that int32 does not hold.
    """
    check_shape(name, array, expected)
    if array.dtype == np.int32:
        return array
    if array.dtype not in (np.uint32, np.int64):
        raise ValueError(f"{name}: dtype {array.dtype} must be int32, uint32 or int64")
    wide = np.iinfo(np.int32)
    outside = np.argwhere((array < wide.min) | (array > wide.max))
    if outside.size:
        place = tuple(map(int, outside[0]))
        raise ValueError(
            f"{name}[{', '.join(map(str, place))}]={array[place]}: must be within int32"
        )
    return array.astype(np.int32)


def check_dtypes(dtype: np.dtype[Any], arrays: dict[str, Array], caches: dict[str, Array]) -> None:
    """`dtype` is supported, all arrays have it, and the caches have it or are of one byte."""
    check_choice("dtype of q, k, v", dtype, DTYPES)
    for name, array in arrays.items():
        if array.dtype != dtype:
            raise ValueError(f"{name}: dtype {array.dtype} must be {dtype}, as the other arrays")
    first = next(iter(caches.values()))
    allowed = [dtype] if dtype == np.float32 else [dtype, *QUANTISED_DTYPES]
    for name, cache in caches.items():
        if cache.dtype not in allowed or cache.dtype != first.dtype:
            names = " or ".join(str(each) for each in allowed)
            raise ValueError(f"{name}: dtype {cache.dtype} must be {names}, the same for k and v")


def check_caches(
    k_cache: Array,
    v_cache: Array,
    num_kv_heads: int | None,
    head_dim: int,
    k_pre_transposed: bool = False,
    value_dim: int | None = None,
    key_dims: range = HEAD_DIMS,
) -> None:
    """The caches have one supported shape [num_blocks, KV, block_size, head_dim].

    A pre-transposed K cache is [num_blocks, KV, head_dim, block_size]. value_dim: that of the V
    cache, where it may differ.
    """
    check_choice("k_pre_transposed", k_pre_transposed, (False, True))
    rows, columns = (3, 2) if k_pre_transposed else (2, 3)
    expected: list[int | None] = [None, num_kv_heads, None, None]
    expected[columns] = head_dim
    check_shape("k_cache", k_cache, tuple(expected))
    num_blocks, heads, block_size = k_cache.shape[0], k_cache.shape[1], k_cache.shape[rows]
    check_shape("v_cache", v_cache, (num_blocks, heads, block_size, value_dim or head_dim))
    layout = "[num_blocks, KV, d, block_size]" if rows == 3 else "[num_blocks, KV, block_size, d]"
    check_choice(f"block_size (k_cache.shape[{rows}] of {layout})", block_size, BLOCK_SIZES)
    check_head_dim("head_dim", head_dim, key_dims)
    if k_pre_transposed and num_blocks * heads >= MOST_COLUMN_BLOCKS:
        raise ValueError(
            f"k_cache: {num_blocks} pre-transposed blocks of {heads} KV heads must be below "
            f"{MOST_COLUMN_BLOCKS} together"
        )


def check_head_dim(name: str, head_dim: int, sizes: range = HEAD_DIMS) -> None:
    """A head size that the kernels have."""
    if head_dim not in sizes:
        raise ValueError(
            f"{name}={head_dim}: must be a multiple of {sizes.step} within {sizes[0]}..{sizes[-1]}"
        )


def padded_features(head_dim: int) -> int:
    """Features that the columns of a head have room for beyond 128: whole partitions."""
    return head_dim if head_dim <= PARTITIONS else -(-head_dim // PARTITIONS) * PARTITIONS


def check_apart(k_cache: Array, v_cache: Array, **read: Array) -> None:
    """Caches that are written overlap nothing that is read."""
    for name, array in read.items():
        if any(np.shares_memory(array, cache) for cache in (k_cache, v_cache)):
            raise ValueError(f"{name}: shares memory with a cache, must be an array of its own")


def check_chunk(q: Array, k: Array, v: Array) -> None:
    """Q [H, S, d] and k, v [KV, S, d] belong together, and the chunk fits SBUF."""
    check_shape("q", q, (None, None, None))
    check_shape("k", k, (None, q.shape[1], q.shape[2]))
    check_value_rows(v, k)
    queries_per_kv_head(q.shape[0], k.shape[0])
    check_queries(q, v.shape[2])


def check_value_rows(v: Array, k: Array) -> None:
    """V [KV, T, dv] belongs to k [KV, T, d]."""
    check_shape("v", v, (*k.shape[:2], None))
    check_value_dim("v", v.shape[2], k.shape[2])


def check_value_dim(name: str, value_dim: int, key_dim: int) -> None:
    """Values take no more parts of 128 features than keys."""
    if value_dim == key_dim:
        return
    check_head_dim(f"{name}: head size", value_dim)
    most = -(-key_dim // PARTITIONS) * PARTITIONS
    if value_dim > most:
        raise ValueError(
            f"{name}: head size {value_dim} must be at most {most} for keys of {key_dim}"
        )


def check_queries(q: Array, value_dim: int) -> None:
    """Q [H, S, d]: a head's rows, with values of `value_dim` features, fit SBUF."""
    check_shape("q", q, (None, None, None))
    features = max(padded_features(q.shape[2]), value_dim)
    most = min(MOST_ROWS, CHUNK_BYTES // (features * q.dtype.itemsize))
    most -= most % PARTITIONS
    if q.shape[1] > most:
        raise ValueError(f"q: S={q.shape[1]} must be at most {most}")


def check_cross(k: Array | None, v: Array | None, causal: bool, softmax: str) -> None:
    """Attention without keys of its own: both are absent, and no row stands among the keys."""
    if k is not None or v is not None:
        name = "k" if k is None else "v"
        raise ValueError(f"{name}=None: must be an array, or both k and v None")
    if causal:
        raise ValueError("k=None: cross attention needs causal=False")
    check_choice("softmax without k and v", softmax, ("auto", "exact"))


def check_written_rows(name: str, k: Array) -> None:
    """The rows [KV, T, d] of one cache write fit a program and SBUF."""
    num_kv_heads, num_tokens, head_dim = k.shape
    if num_kv_heads * head_dim > WIDEST_TOKEN:
        raise ValueError(
            f"{name}: {num_kv_heads} KV heads of head_dim={head_dim} must have at most "
            f"{WIDEST_TOKEN} elements together"
        )
    most = MOST_WRITTEN_ROWS // (num_kv_heads + 4)
    if num_tokens > most:
        raise ValueError(
            f"{name}: T={num_tokens} must be at most {most} for {num_kv_heads} KV heads: store "
            "longer chunks in several calls"
        )


def check_integer(name: str, value: SupportsIndex) -> int:
    """`value`, an integer or an array of one, as an int."""
    try:
        return int(operator.index(value.item() if hasattr(value, "item") else value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}={value!r}: must be an integer") from error


def check_count(name: str, value: SupportsIndex, most: int) -> int:
    """`value` as an int within 0 .. most."""
    count = check_integer(name, value)
    if not 0 <= count <= most:
        raise ValueError(f"{name}={count}: must be within 0..{most}")
    return count


def _number(name: str, value: Any, allowed: str) -> float:
    """`value` as a float; text is none."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text is no number")
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}={value!r}: must be {allowed}") from error


def check_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale: positive, its products stay in fp32; None is 1 / sqrt(head_dim)."""
    value = head_dim**-0.5 if scale is None else _number("scale", scale, "a number, or None")
    low, high = SOFTMAX_SCALES
    if not low <= value <= high:
        raise ValueError(f"scale={scale}: must be within {low:g}..{high:g}")
    return value


def check_softcap(softcap: float) -> float:
    """A number within SOFTCAPS, or 0 for none."""
    number = _number("softcap", softcap, "a number")
    smallest, largest = SOFTCAPS
    if number and not smallest <= number <= largest:
        raise ValueError(f"softcap={softcap}: must be 0 or within {smallest:g}..{largest:g}")
    return number


def check_cores(lnc: SupportsIndex) -> int:
    """The number of physical cores, 1 or 2."""
    cores = check_integer("lnc", lnc)
    check_choice("lnc", cores, (1, 2))
    return cores


def check_softmax(softmax: str, q: Array, value_dim: int, most_tokens: int) -> str:
    """The mode that a prefill kernel runs in: "exact", "bounded" or "auto".

    most_tokens: of prior and chunk together in any call of these shapes.
    """
    check_choice("softmax", softmax, SOFTMAX_MODES)
    _, num_rows, head_dim = q.shape
    chunk_bytes = num_rows * max(padded_features(head_dim), value_dim) * q.dtype.itemsize
    boundable = q.dtype != np.float16 and chunk_bytes <= BOUNDED_CHUNK_BYTES
    if softmax == "bounded" and not boundable:
        raise ValueError(
            f"softmax='bounded': needs bfloat16 or float32 (not {q.dtype}) and at most "
            f"{BOUNDED_CHUNK_BYTES} bytes of a head's keys (S={num_rows}, head_dim={head_dim})"
        )
    is_faster = boundable and q.dtype == ml_dtypes.bfloat16 and most_tokens >= FEW_TOKENS
    if softmax == "auto" and not is_faster:
        return "exact"
    return softmax


def check_window(sliding_window: SupportsIndex | None, causal: bool) -> int | None:
    """The window counts the token itself: at least 1; None is no window, as causal=False needs."""
    check_choice("causal", causal, (True, False))
    if sliding_window is not None and not causal:
        raise ValueError(f"sliding_window={sliding_window}: must be None with causal=False")
    if sliding_window is None:
        return None
    window = check_integer("sliding_window", sliding_window)
    if window < 1:
        raise ValueError(f"sliding_window={window}: must be at least 1, or None")
    return min(window, LONGEST_WINDOW)


def check_tree_mask(tree_mask: Array | None, causal: bool, query_lens: Array, most: int) -> None:
    """[B, T, T] bool, T = `most`: each real query sees itself; what lies beyond is not read."""
    if tree_mask is None:
        return
    if not causal:
        raise ValueError("tree_mask: must be None with causal=False")
    check_shape("tree_mask", tree_mask, (len(query_lens), most, most))
    if tree_mask.dtype != np.bool_:
        raise ValueError(f"tree_mask: dtype {tree_mask.dtype} must be bool")
    own = np.diagonal(tree_mask, axis1=1, axis2=2)
    for request, query in np.argwhere(~own & (np.arange(most) < query_lens[:, None]))[:1].tolist():
        raise ValueError(
            f"tree_mask[{request}, {query}, {query}]=False: must be True, a query sees itself"
        )


def check_sinks(sinks: Array | None, num_q_heads: int) -> Array | None:
    """Sinks [H] fp32 as [1, H]; -infinity is a head without a sink."""
    if sinks is None:
        return None
    check_shape("sinks", sinks, (num_q_heads,))
    if sinks.dtype != np.float32:
        raise ValueError(f"sinks: dtype {sinks.dtype} must be float32")
    if not (sinks < np.inf).all():
        raise ValueError(f"sinks={sinks}: must be below infinity")
    return np.ascontiguousarray(sinks[None])


def check_cache_scale(name: str, scale: Any, cache: Array) -> Array | None:
    """A cache's scale, a number or [KV], as [1, KV] fp32; a cache of one byte needs one."""
    num_kv_heads = cache.shape[1]
    if scale is None:
        if cache.dtype in QUANTISED_DTYPES:
            raise ValueError(
                f"{name}=None: a cache of {cache.dtype} needs a number or [{num_kv_heads}]"
            )
        return None
    try:
        values = np.asarray(scale).astype(np.float32, casting="same_kind")
    except TypeError as error:
        raise ValueError(f"{name}={scale}: must be a number or [{num_kv_heads}]") from error
    if values.shape not in ((), (num_kv_heads,)):
        raise ValueError(f"{name}: shape {values.shape} must be () or ({num_kv_heads},)")
    if not ((values >= SMALLEST_SCALE) & (values <= 1 / SMALLEST_SCALE)).all():
        raise ValueError(
            f"{name}={scale}: must be within {SMALLEST_SCALE:g}..{1 / SMALLEST_SCALE:g}"
        )
    return np.ascontiguousarray(np.broadcast_to(values, (1, num_kv_heads)))


def check_segment_size(kv_segment_size: SupportsIndex, block_size: int) -> int:
    """A segment is whole tiles of 128 tokens and whole blocks."""
    size = check_integer("kv_segment_size", kv_segment_size)
    if size < 1 or size % PARTITIONS or size % block_size:
        raise ValueError(
            f"kv_segment_size={size}: must be a positive multiple of {PARTITIONS} and of "
            f"block_size={block_size}"
        )
    return size


def device_fp8(cache: Array) -> Array:
    """float8_e4m3fn as trn2's float8_e4m3: the same bits up to +-240."""
    return cache.view(ml_dtypes.float8_e4m3) if cache.dtype in FP8_DTYPES else cache
