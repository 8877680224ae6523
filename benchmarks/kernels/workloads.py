"""Kernel calls to model or to time: shapes, FLOPs and bytes of the problem, and its arrays."""

from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from segattn.reference.paging import PAD_SLOT_ID, UNUSED_BLOCK, num_blocks_for

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


class Workload(Protocol):
    """One call of a public kernel of `segattn.kernels`."""

    @property
    def label(self) -> str:
        """Short name for a table row."""

    @property
    def kernel(self) -> str:
        """Name of the public function."""

    @property
    def model_flops(self) -> float:
        """FLOPs that the attention needs: two matmuls over visible (query, key) pairs."""

    @property
    def model_bytes(self) -> float:
        """Bytes that must cross HBM once: inputs that are needed, and outputs."""

    def arguments(self, rng: np.random.Generator) -> dict[str, Any]:
        """Arguments of the call by name; NaN wherever nothing may be read."""


def _normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, np.float32).astype(BF16)


def _cache_dtype(fp8: bool) -> np.dtype[Any]:
    dtype: np.dtype[Any] = FP8 if fp8 else BF16
    return dtype


def _differences(block_size: int, fp8: bool, window: int | None) -> str:
    """What a label says of a cache that is not bf16 in blocks of 32, and of a window."""
    text = "" if block_size == 32 else f", blocks of {block_size}"
    text += ", fp8" if fp8 else ""
    return text if window is None else f"{text}, window {window}"


@dataclass(frozen=True)
class Prefill:
    """A chunk of a prompt after `prior` cached tokens; without prior it is a padded prefill."""

    rows: int
    prior: int
    q_heads: int = 4
    kv_heads: int = 1
    head_dim: int = 128
    block_size: int = 32
    num_tokens: int | None = None
    """Real tokens among the rows; None = all."""
    window: int | None = None
    fp8: bool = False
    """As in Decode; with a prior."""

    @property
    def label(self) -> str:
        """Rows / prior, query heads x head size, block size, fp8, window."""
        tokens = "" if self.num_tokens is None else f" ({self.num_tokens} real)"
        label = f"{self.rows}/{self.prior}{tokens}, {self.q_heads}x{self.head_dim}"
        return label + _differences(self.block_size, self.fp8, self.window)

    @property
    def kernel(self) -> str:
        """segmented_attention, or padded_prefill without prior."""
        return "segmented_attention" if self.prior else "padded_prefill"

    @property
    def _tokens(self) -> int:
        return self.rows if self.num_tokens is None else self.num_tokens

    @property
    def model_flops(self) -> float:
        """4 head_dim FLOPs per head and visible pair."""
        keys = self.prior + 1 + np.arange(self._tokens)
        seen = keys if self.window is None else np.minimum(keys, self.window)
        return 4.0 * self.q_heads * self.head_dim * float(seen.sum())

    @property
    def model_bytes(self) -> float:
        """q, out, keys and values of the chunk and the visible prior; the write without prior."""
        row = self.head_dim * BF16.itemsize
        n = self._tokens
        prior = self.prior if self.window is None else min(self.prior, self.window - 1)
        cached = prior * _cache_dtype(self.fp8).itemsize / BF16.itemsize
        written = 0 if self.prior else n
        return float(row * 2 * (n * self.q_heads + (cached + n + written) * self.kv_heads))

    def arguments(self, rng: np.random.Generator) -> dict[str, Any]:
        """A cache of just the blocks needed, in random order, plus block 0."""
        n, kv, d, size = self._tokens, self.kv_heads, self.head_dim, self.block_size
        num_blocks = num_blocks_for(self.prior + n, size)
        table = 1 + rng.permutation(num_blocks).astype(np.int32)
        caches = []
        for _ in range(2):
            tokens = np.full((num_blocks * size, kv, d), np.nan, np.float32).astype(BF16)
            hidden = 0 if self.window is None else max(0, self.prior - self.window + 1)
            tokens[hidden : self.prior] = _normal(rng, self.prior - hidden, kv, d)
            cache = np.full((num_blocks + 1, kv, size, d), np.nan, np.float32).astype(BF16)
            cache[table] = tokens.reshape(num_blocks, size, kv, d).transpose(0, 2, 1, 3)
            caches.append(cache.astype(_cache_dtype(self.fp8)))
        chunk: dict[str, Any] = {
            name: _normal(rng, heads, self.rows, d)
            for name, heads in (("q", self.q_heads), ("k", kv), ("v", kv))
        }
        for array in chunk.values():
            array[:, n:] = np.nan
        chunk.update(k_cache=caches[0], v_cache=caches[1], sliding_window=self.window)
        if self.fp8:
            chunk.update(k_scale=1.0, v_scale=1.0)
        if self.prior:
            return {**chunk, "block_table": table, "prior_tokens": self.prior, "num_tokens": n}
        slots = np.full(self.rows, PAD_SLOT_ID, np.int32)
        positions = np.arange(n)
        slots[:n] = table[positions // size] * size + positions % size
        return {**chunk, "slot_mapping": slots, "num_tokens": n}


@dataclass(frozen=True)
class Decode:
    """One new token for each of `batch` requests with `context` cached tokens each."""

    batch: int
    context: int
    q_heads: int = 8
    kv_heads: int = 1
    head_dim: int = 128
    block_size: int = 32
    fp8: bool = False
    """The cache holds float8_e4m3fn, with one scale for all keys and one for all values."""
    window: int | None = None
    table_tokens: int | None = None
    """Tokens that a table has room for; None = the usual bucket of `context`."""
    value_dim: int | None = None
    """Values are so many features of the keys; None: there is a V cache."""

    @property
    def label(self) -> str:
        """Batch x context, query heads / KV heads x head size, block size, fp8, window."""
        heads = f"{self.q_heads}" if self.kv_heads == 1 else f"{self.q_heads}/{self.kv_heads}"
        label = f"decode {self.batch}x{self.context}, {heads}x{self.head_dim}"
        label += _differences(self.block_size, self.fp8, self.window)
        label += "" if self.value_dim is None else f", values of {self.value_dim}"
        return label if self.table_tokens is None else f"{label}, tables of {self.table_tokens}"

    @property
    def kernel(self) -> str:
        """paged_decode."""
        return "paged_decode"

    @property
    def model_flops(self) -> float:
        """2 FLOPs per head, visible key, and feature of it and of its value."""
        features = self.head_dim + (self.value_dim or self.head_dim)
        return 2.0 * self.batch * self.q_heads * features * self._visible

    @property
    def model_bytes(self) -> float:
        """Visible keys and values, q and out."""
        row = self.kv_heads * self.head_dim * _cache_dtype(self.fp8).itemsize
        cache = self._visible * row * (2 if self.value_dim is None else 1)
        features = self.head_dim + (self.value_dim or self.head_dim)
        return float(self.batch * (cache + self.q_heads * BF16.itemsize * features))

    @property
    def _visible(self) -> int:
        return self.context if self.window is None else min(self.context, self.window)

    def arguments(self, rng: np.random.Generator) -> dict[str, Any]:
        """A cache of just the blocks needed, in random order, plus block 0.

        Tables are as wide as the next power of two of blocks, the usual bucket.
        """
        per_request = num_blocks_for(self.context, self.block_size)
        width = 1 << (per_request - 1).bit_length()
        if self.table_tokens is not None:
            width = num_blocks_for(self.table_tokens, self.block_size)
        spare = width - per_request
        num_blocks = self.batch * per_request
        tables = 1 + rng.permutation(num_blocks).astype(np.int32).reshape(self.batch, -1)
        shape = (num_blocks + 1, self.kv_heads, self.block_size, self.head_dim)
        return {
            "q": _normal(rng, self.batch, self.q_heads, 1, self.head_dim),
            "k_cache": _normal(rng, *shape).astype(_cache_dtype(self.fp8)),
            "v_cache": None
            if self.value_dim
            else _normal(rng, *shape).astype(_cache_dtype(self.fp8)),
            "value_dim": self.value_dim,
            "block_tables": np.pad(tables, ((0, 0), (0, spare)), constant_values=UNUSED_BLOCK),
            "context_lens": np.full(self.batch, self.context, np.int32),
            "sliding_window": self.window,
            **({"k_scale": 1.0, "v_scale": 1.0} if self.fp8 else {}),
        }


@dataclass(frozen=True)
class CacheWrite:
    """The keys and values of `rows` consecutive tokens into their blocks."""

    rows: int
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 32
    first: int = 0
    """Place of the first token in its block."""

    @property
    def label(self) -> str:
        """Rows, KV heads x head size, block size, where the first token goes."""
        label = f"write {self.rows}, {self.kv_heads}x{self.head_dim}"
        label += _differences(self.block_size, False, None)
        return f"{label}, from {self.first} on" if self.first else label

    @property
    def kernel(self) -> str:
        """write_kv_cache."""
        return "write_kv_cache"

    @property
    def model_flops(self) -> float:
        """None."""
        return 0.0

    @property
    def model_bytes(self) -> float:
        """Keys and values, read once and written once."""
        return float(4 * self.rows * self.kv_heads * self.head_dim * BF16.itemsize)

    def arguments(self, rng: np.random.Generator) -> dict[str, Any]:
        """Blocks in random order."""
        num_blocks = num_blocks_for(self.first + self.rows, self.block_size)
        table = 1 + rng.permutation(num_blocks).astype(np.int32)
        positions = self.first + np.arange(self.rows)
        size = self.block_size
        shape = (num_blocks + 1, self.kv_heads, size, self.head_dim)
        return {
            "k": _normal(rng, self.kv_heads, self.rows, self.head_dim),
            "v": _normal(rng, self.kv_heads, self.rows, self.head_dim),
            "k_cache": np.zeros(shape, BF16),
            "v_cache": np.zeros(shape, BF16),
            "slot_mapping": (table[positions // size] * size + positions % size).astype(np.int32),
        }


@dataclass(frozen=True)
class KeyColumns:
    """A workload with a pre-transposed K cache."""

    rows: Workload

    @property
    def label(self) -> str:
        """That of the workload, and that keys are columns."""
        return f"{self.rows.label}, key columns"

    @property
    def kernel(self) -> str:
        """That of the workload."""
        return self.rows.kernel

    @property
    def model_flops(self) -> float:
        """Those of the workload."""
        return self.rows.model_flops

    @property
    def model_bytes(self) -> float:
        """Those of the workload."""
        return self.rows.model_bytes

    def arguments(self, rng: np.random.Generator) -> dict[str, Any]:
        """Those of the workload, with K blocks [head_dim, block_size]."""
        given = self.rows.arguments(rng)
        columns = np.ascontiguousarray(given["k_cache"].swapaxes(2, 3))
        return {**given, "k_cache": columns, "k_pre_transposed": True}
