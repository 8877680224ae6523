"""The chunk's first key, in place of cached keys that are absent.

Whoever sees a cached key sees the chunk's first key, too: it stands between that key and the row.
So the running maximum of an exact softmax is right, and finite, with this key wherever a cached one
is absent, and their scores need no mask; their values are zero. A cached key of an earlier segment
that all rows see does as well, which is what a skipped gather leaves. Scores of cached keys take a
k_scale that the chunk's own do not: with a k_scale absent keys are masked instead.
"""

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from .on_chip import sbuf


class FirstKey:
    """The chunk's first key [128, d] of a KV head on every partition, zero if it is padding."""

    def __init__(
        self,
        k: nl.NkiTensor,  # [KV, S, d] HBM
        kv_head: int,
        num_tokens: nl.NkiTensor,  # [128, 1] fp32: real rows of the chunk
    ) -> None:
        _, num_rows, d = k.shape
        self._d = d
        self._row = sbuf((PARTITIONS, d), k.dtype)
        stored = sbuf((PARTITIONS, d), k.dtype)
        nisa.dma_copy(
            dst=stored, src=k.ap([[0, PARTITIONS], [1, d]], offset=kv_head * num_rows * d)
        )
        is_real = sbuf((PARTITIONS, 1), nl.uint8)
        nisa.tensor_scalar(dst=is_real, data=num_tokens, op0=nl.greater, operand0=0.0)
        nisa.select_reduce(
            dst=self._row, predicate=is_real.ap([[1, PARTITIONS], [0, d]]), on_true=stored,
            on_false=0.0,
        )  # fmt: skip

    def fill(self, rows: nl.NkiTensor) -> None:
        """Copy it to every token of rows [128, tokens * d]."""
        tokens = rows.shape[1] // self._d
        nisa.tensor_copy(
            dst=rows, src=self._row.ap([[self._d, PARTITIONS], [0, tokens], [1, self._d]]),
            engine=nisa.engine.gpsimd,
        )  # fmt: skip
