"""Checks of a kernel call on the host, before a byte moves. Shapes: shape_checks.py; slots and
tables: addresses.py.

Every failure is a ValueError that names the argument, its value and what is allowed.
"""

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .sizes import padded_features

Array = npt.NDArray[Any]

DTYPES = tuple(np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16))
FP8_DTYPES = tuple(np.dtype(t) for t in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3fn))
QUANTISED_DTYPES = (*FP8_DTYPES, np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.int8))
"""Caches of one byte, which need scales."""
BOUNDED_CHUNK_BYTES = 2 << 20
"""The same with softmax="bounded"."""
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


def device_fp8(cache: Array) -> Array:
    """float8_e4m3fn as trn2's float8_e4m3: the same bits up to +-240."""
    return cache.view(ml_dtypes.float8_e4m3) if cache.dtype in FP8_DTYPES else cache
