"""Calls of the four kernels of every supported shape, drawn at random: shapes only, no data.

Lengths are 0 and tables empty: a compiled kernel depends on neither, and nothing runs here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from segattn.kernels.shape_checks import BLOCK_SIZES, HEAD_DIMS
from segattn.reference.paging import PAD_SLOT_ID, UNUSED_BLOCK

Array = NDArray[Any]

HEADS = (
    (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (7, 1), (8, 1), (16, 1), (32, 1), (71, 1), (128, 1),
    (12, 2), (9, 3), (28, 4), (8, 8), (32, 8), (40, 8), (48, 8), (64, 8), (128, 8),
    (64, 64), (96, 96), (128, 128),
)  # fmt: skip
"""Query heads and KV heads."""
DTYPES = tuple(np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32))
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
WINDOWS = (None, 1, 128, 129, 4096)
CHUNKS = (128, 256, 384, 512, 1024, 1152, 2048, 3072, 4096, 5120, 8192, 16384, 32768, 65536)
TABLE_TOKENS = (16, 128, 512, 1024, 2048, 4096, 8192, 32768, 131072)
SEGMENTS = (128, 256, 384, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 3, 4, 8, 16, 17, 32, 64, 128, 256)
QUERIES = (1, 2, 3, 4, 5, 8, 16, 32, 128)
MODES = ("auto", "exact", "bounded")
WRITES = (1, 127, 128, 129, 512, 2048, 8192, 8200, 16384, 32768, 65536)


@dataclass(frozen=True)
class Call:
    """A host function of `segattn.kernels` and its arguments."""

    kernel: str
    label: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class _Drawn:
    """What all four kernels have in common."""

    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: np.dtype[Any]
    fp8: bool
    columns: bool  # K cache pre-transposed

    @property
    def label(self) -> str:
        fp8 = "+fp8" if self.fp8 else ""
        columns = " columns" if self.columns else ""
        return (
            f"{self.q_heads}/{self.kv_heads}x{self.head_dim} {self.dtype.name}{fp8} "
            f"blocks {self.block_size}{columns}"
        )

    def zeros(self, *shape: int) -> Array:
        return np.zeros(shape, self.dtype)

    def cache(self) -> dict[str, Any]:
        """A cache of one block, and its scales."""
        d, size = self.head_dim, self.block_size
        dtype = FP8 if self.fp8 else self.dtype
        keys = (d, size) if self.columns else (size, d)
        arguments: dict[str, Any] = {
            "k_cache": np.zeros((1, self.kv_heads, *keys), dtype),
            "v_cache": np.zeros((1, self.kv_heads, size, d), dtype),
            "k_pre_transposed": self.columns,
        }
        return {**arguments, "k_scale": 1.0, "v_scale": 1.0} if self.fp8 else arguments


def _draw(random: Random) -> _Drawn:
    q_heads, kv_heads = random.choice(HEADS)
    dtype = random.choice(DTYPES)
    return _Drawn(
        q_heads,
        kv_heads,
        random.choice(HEAD_DIMS),
        random.choice(BLOCK_SIZES),
        dtype,
        dtype.itemsize == 2 and random.choice((False, True)),
        random.choice((False, False, True)),
    )


def _options(random: Random, drawn: _Drawn) -> tuple[str, dict[str, Any]]:
    """Window, sinks and cores of an attention call."""
    window, cores = random.choice(WINDOWS), random.choice((1, 2))
    sinks = np.zeros(drawn.q_heads, np.float32) if random.choice((False, True)) else None
    label = f"lnc {cores}"
    label += f" window {window}" if window else ""
    label += " sinks" if sinks is not None else ""
    softcap = random.choice((0.0, 30.0))
    label += " capped" if softcap else ""
    return label, {"sliding_window": window, "sinks": sinks, "lnc": cores, "softcap": softcap}


def _chunk(random: Random, drawn: _Drawn) -> tuple[str, dict[str, Any]]:
    """A chunk of new rows."""
    rows, mode = random.choice(CHUNKS), random.choice(MODES)
    label, options = _options(random, drawn)
    arguments = {
        "q": drawn.zeros(drawn.q_heads, rows, drawn.head_dim),
        "k": drawn.zeros(drawn.kv_heads, rows, drawn.head_dim),
        "v": drawn.zeros(drawn.kv_heads, rows, drawn.head_dim),
        "num_tokens": 0,
        "softmax": mode,
        **drawn.cache(),
        **options,
    }
    return f"S {rows}, {drawn.label} {mode} {label}", arguments


def padded_prefill(random: Random) -> Call:
    """A chunk without prior."""
    label, arguments = _chunk(random, _draw(random))
    arguments["slot_mapping"] = np.full(arguments["q"].shape[1], PAD_SLOT_ID, np.int32)
    return Call("padded_prefill", label, arguments)


def segmented_attention(random: Random) -> Call:
    """A chunk over a table of up to 131072 tokens."""
    drawn = _draw(random)
    label, arguments = _chunk(random, drawn)
    width = max(1, random.choice(TABLE_TOKENS) // drawn.block_size)
    segment = random.choice(SEGMENTS)
    arguments["block_table"] = np.full(width, UNUSED_BLOCK, np.int32)
    arguments.update(prior_tokens=0, kv_segment_size=segment)
    label += f" table {width * drawn.block_size} segment {segment}"
    return Call("segmented_attention", label, arguments)


def paged_decode(random: Random) -> Call:
    """Any batch over tables of up to 131072 tokens."""
    drawn = _draw(random)
    group = drawn.q_heads // drawn.kv_heads
    queries = random.choice([n for n in QUERIES if group * n <= 128])
    requests = random.choice(BATCHES)
    width = max(1, random.choice(TABLE_TOKENS) // drawn.block_size)
    label, options = _options(random, drawn)
    arguments = {
        "q": drawn.zeros(requests, drawn.q_heads, queries, drawn.head_dim),
        "block_tables": np.full((requests, width), UNUSED_BLOCK, np.int32),
        "context_lens": np.zeros(requests, np.int32),
        **drawn.cache(),
        **options,
    }
    label = f"B {requests} T {queries}, {drawn.label} {label} table {width * drawn.block_size}"
    return Call("paged_decode", label, arguments)


def write_kv_cache(random: Random) -> Call:
    """Any number of rows."""
    drawn = _draw(random)
    rows = random.choice(WRITES)
    arguments = {
        "k": drawn.zeros(drawn.kv_heads, rows, drawn.head_dim),
        "v": drawn.zeros(drawn.kv_heads, rows, drawn.head_dim),
        "slot_mapping": np.full(rows, PAD_SLOT_ID, np.int32),
        **drawn.cache(),
    }
    return Call("write_kv_cache", f"T {rows}, {drawn.label}", arguments)


DRAW: dict[str, Callable[[Random], Call]] = {
    "padded_prefill": padded_prefill,
    "segmented_attention": segmented_attention,
    "paged_decode": paged_decode,
    "write_kv_cache": write_kv_cache,
}
"""A random call of each kernel."""
