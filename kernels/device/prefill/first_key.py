"""The chunk's first key, in place of cached keys that are absent.

Whoever sees a cached key sees the chunk's first key, too: it stands between that key and the row.
So the running maximum of an exact softmax is right, and finite, with this key wherever a cached one
is absent, and their scores need no mask; their values are zero. A cached key of an earlier segment
that all rows see does as well, which is what a skipped gather leaves. Scores of cached keys take a
k_scale that the chunk's own do not: with a k_scale absent keys are masked instead.
"""

from ...backend import nisa, nl
from ...sizes import PARTITIONS


class FirstKey(nl.NKIObject):
    """The chunk's first key [128, d] of a KV head on every partition, zero if it is padding."""

    def __init__(
        self,
        k: nl.NkiTensor,  # [KV, S, d] HBM
        kv_head: int,
        num_tokens: nl.NkiTensor,  # [128, 1] fp32: real rows of the chunk
    ) -> None:
        self.k = k
        self.kv_head = kv_head
        self.num_tokens = num_tokens
        self.d = k.shape[2]
        self.rows = nl.ndarray((PARTITIONS, self.d), dtype=k.dtype, buffer=nl.sbuf)

    def write(self) -> None:
        """Read it."""
        _, num_rows, d = self.k.shape
        stored = nl.ndarray((PARTITIONS, d), dtype=self.k.dtype, buffer=nl.sbuf)
        nisa.dma_copy(
            dst=stored, src=self.k.ap([[0, PARTITIONS], [1, d]], offset=self.kv_head * num_rows * d)
        )
        is_real = nl.ndarray((PARTITIONS, 1), dtype=nl.uint8, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=is_real, data=self.num_tokens, op0=nl.greater, operand0=0.0)
        nisa.select_reduce(
            dst=self.rows, predicate=is_real.ap([[1, PARTITIONS], [0, d]]), on_true=stored,
            on_false=0.0,
        )  # fmt: skip

    def fill(self, rows: nl.NkiTensor, engine: nisa.engine) -> None:
        """Copy it to every token of rows [128, tokens * d]."""
        tokens = rows.shape[1] // self.d
        nisa.tensor_copy(
            dst=rows, src=self.rows.ap([[self.d, PARTITIONS], [0, tokens], [1, self.d]]),
            engine=engine,
        )  # fmt: skip
