"""Staging tiles of the decode kernel: what gathers of runs fill."""

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..loading import element_bytes
from .batch import DecodeArguments

ZERO_BYTES = 4096
"""Bytes per partition of the zeros that staging tiles begin with."""

STAGES = 4
"""Staging tiles of keys and of values: so many work tiles are loaded or in use at once."""


class Stages:
    """Staging tiles, which keep their contents over trips: runs of index -1 are not loaded."""

    def __init__(self, args: DecodeArguments, key_dtype: str, num_parts: int) -> None:
        count = min(STAGES, args.tiles)

        def new(tokens: int, width: int, dtype: str) -> nl.NkiTensor:
            return nl.ndarray((PARTITIONS, tokens * width), dtype=dtype, buffer=nl.sbuf)

        self.keys = [new(args.tokens, args.d, key_dtype) for _ in range(count)]
        self.edge_keys = [new(args.edge_tokens, args.d, key_dtype) for _ in range(num_parts)]
        # Values that are features of the keys lie where the keys do.
        self.values, self.edge_values = self.keys, self.edge_keys
        if args.v_cache is not None:
            width, dtype = args.value_dim, args.v_cache.dtype
            self.values = [new(args.tokens, width, dtype) for _ in range(count)]
            self.edge_values = [new(args.edge_tokens, width, dtype) for _ in range(num_parts)]
        self.queries = [
            nl.ndarray((count * args.rows, args.d), dtype=args.q.dtype, buffer=nl.sbuf)
            for _, count in args.parts
        ]

    def clear(self) -> None:
        """Zeros, so that what no run fills is finite: keys by DVE, values by ACT."""
        for rows in self.queries:
            nisa.memset(dst=rows, value=0.0)
        zeros = nl.ndarray((PARTITIONS, ZERO_BYTES // 4), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=zeros, value=0.0)
        for keys, values in zip(
            self.edge_keys + self.keys, self.edge_values + self.values, strict=True
        ):
            fill(keys, zeros, nl.bfloat16, nisa.engine.vector)
            if values is not keys:
                fill(values, zeros, nl.float32, nisa.engine.scalar)


def fill(tile: nl.NkiTensor, zeros: nl.NkiTensor, dtype: str, engine: nisa.engine) -> None:
    """Copy zeros as elements of a dtype: DVE copies 16-bit ones fastest, ACT words."""
    size = 2 if dtype == nl.bfloat16 else 4
    width = tile.shape[1] * stored_bytes(tile.dtype) // size
    room = ZERO_BYTES // size
    for first in range(0, width, room):
        count = min(room, width - first)
        nisa.tensor_copy(
            dst=tile.ap([[width, PARTITIONS], [1, count]], offset=first, dtype=dtype),
            src=zeros.ap([[room, PARTITIONS], [1, count]], dtype=dtype),
            engine=engine,
        )


def stored_bytes(dtype: str) -> int:
    """Bytes of one element of a cache."""
    return 1 if dtype in (nl.float8_e4m3, nl.float8_e5m2, nl.int8) else element_bytes(dtype)
