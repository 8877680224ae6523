"""What tests of the reference share: caches of NaN, absent slots, the dense formula."""

import numpy as np
import numpy.typing as npt

from segattn.reference.attention import Array, Float64


def nan_caches(num_blocks: int, heads: int, block_size: int, d: int) -> tuple[Array, Array]:
    shape = (num_blocks, heads, block_size, d)
    return np.full(shape, np.nan), np.full(shape, np.nan)


def no_slots(num_rows: int) -> npt.NDArray[np.int32]:
    return np.full(num_rows, -1, np.int32)


def dense(
    q: Array,
    k: Array,
    v: Array,
    prior: int,
    window: int | None = None,
    sinks: Array | None = None,
    softcap: float = 0.0,
    causal: bool = True,
) -> Float64:
    """Whole-matrix softmax attention; query i stands at prior + i, key j at j."""
    group = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, group, 0), np.repeat(v, group, 0)
    scores = np.einsum("hqd,hkd->hqk", q, k) / np.sqrt(q.shape[2])
    if softcap:
        bent = np.exp(2 * scores / softcap)
        scores = softcap * (bent - 1) / (bent + 1)
    behind = prior + np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
    visible = (behind >= 0) & (behind < (np.inf if window is None else window))
    visible |= not causal
    weights = np.where(visible, np.exp(scores), 0.0)
    total = weights.sum(2, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks)[:, None, None]
    return np.asarray(np.einsum("hqk,hkd->hqd", weights, v) / total)
