"""Writing the paged KV cache by the indices of plan/cache_writes.py, in portions.

Whole runs of tokens move in one descriptor each, single tokens in one for each KV head:

    sync     load runs 0 | load runs 1 | load runs 2 | ...
    vector               |    scale, cast, transpose 0 | 1 ...     only fp8 or pre-transposed keys
    gpsimd               | scatter 0   | scatter 1   | ...         gather singles | scatter singles

A pre-transposed block of a head [d, block_size] is one row of its cache: the transpose of a run
takes place within a partition. Of a block that is written in part the rest is read before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from ...reference.kv_cache import E5M2_MAX, FP8_MAX, INT8_MAX
from ...reference.paging import cdiv
from ..backend import nisa, nl
from ..sizes import (
    EDGE_BLOCKS,
    PARTITIONS,
    column_parts,
    num_runs,
    single_tokens,
    tile_heights,
)

AHEAD = 4
"""Tiles of single tokens that are loaded ahead: GpSimd issues their gathers and all scatters."""

GATHERS = 8
"""Gathers of single tokens that a portion issues."""


@dataclass
class Source:
    """Keys or values of a chunk and where they go."""

    chunk: nl.NkiTensor  # [KV, T, d] HBM
    cache: nl.NkiTensor  # [num_blocks, KV, block_size, d] HBM, or [num_blocks, KV, d, block_size]
    scales: nl.NkiTensor | None  # [1, KV] fp32 HBM: what is stored is divided by them
    indices: nl.NkiTensor  # CacheWrites.indices, HBM
    run: int  # CacheWrites.run
    pre_transposed: bool = False

    def work(self) -> Iterator[None]:
        """The whole write, a few DMAs in each portion."""
        return _RowWriter(self).work() if not self.pre_transposed else _ColumnWriter(self).work()


class _Writer:
    """What both layouts share."""

    def __init__(self, source: Source, parts: int = 1) -> None:
        self.source = source
        self.cache = source.cache
        self.num_kv_heads, self.num_tokens, self.d = source.chunk.shape
        self.parts, self.features = parts, self.d // parts
        tokens = self.num_kv_heads * self.num_tokens
        self.tokens = source.chunk.reshape((tokens, self.d))
        self.rows = source.chunk.reshape((tokens * parts, self.features))
        self.indices = nl.ndarray(source.indices.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=self.indices, src=source.indices)
        self.num_runs = num_runs(self.num_tokens, source.run)
        self.run_heights = tile_heights(parts * self.num_kv_heads * self.num_runs)
        self.first_single = 1 + 2 * len(self.run_heights)

    def column(self, number: int, height: int) -> nl.NkiTensor:
        """A column of the indices, [height, 1]."""
        return self.indices[0:height, number : number + 1]

    def runs(self) -> Iterator[tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]]:
        """Runs [n, run * features], their rows of the cache and KV heads [n, 1], n <= 128."""
        for i, height in enumerate(self.run_heights):
            width = self.source.run * self.features
            tile = nl.ndarray((height, width), dtype=self.rows.dtype, buffer=nl.sbuf)
            done = 0
            while done < height:
                line, number = divmod(i * PARTITIONS + done, self.num_runs)
                count = min(height - done, self.num_runs - number)
                self.load_runs(line, number, tile[done : done + count, :])
                done += count
            yield tile, self.column(1 + 2 * i, height), self.column(2 + 2 * i, height)

    def load_runs(self, line: int, number: int, tile: nl.NkiTensor) -> None:
        """Consecutive runs of a part of the features of a KV head."""
        part, head = divmod(line, self.num_kv_heads)
        run, d = self.source.run, self.d
        pattern = [[run * d, tile.shape[0]], [d, run], [1, self.features]]
        if self.parts == 1:
            pattern = [[run * d, tile.shape[0]], [1, run * d]]
        nisa.dma_copy(
            dst=tile,
            src=self.tokens.ap(
                pattern,
                offset=(head * self.num_tokens + number * run) * d + part * self.features,
                scalar_offset=self.column(0, 1), indirect_dim=0,
            ),
        )  # fmt: skip

    def inverse_of(self, heads: nl.NkiTensor) -> nl.NkiTensor | None:
        """Reciprocal scales [n, 1] of the KV heads [n, 1]."""
        if self.source.scales is None:
            return None
        inverse = nl.ndarray(heads.shape, dtype=nl.float32, buffer=nl.sbuf)
        gather(self.source.scales.reshape((self.num_kv_heads, 1)), heads, inverse)
        nisa.reciprocal(dst=inverse, data=inverse)
        return inverse

    def stored(
        self, values: nl.NkiTensor, shape: tuple[int, ...], inverse: nl.NkiTensor | None
    ) -> nl.NkiTensor:
        """Values times a column in the cache's dtype, in the order of the view; shape [n, m]."""
        result = nl.ndarray(shape, dtype=self.cache.dtype, buffer=nl.sbuf)
        most = largest_stored(self.cache.dtype)
        if inverse is None:
            nisa.tensor_copy(dst=result, src=values)
        elif most is None:
            nisa.tensor_scalar(dst=result, data=values, op0=nl.multiply, operand0=inverse)
        else:
            scaled = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(
                dst=scaled, data=values, op0=nl.multiply, operand0=inverse, op1=nl.minimum,
                operand1=most,
            )  # fmt: skip
            nisa.tensor_scalar(dst=result, data=scaled, op0=nl.maximum, operand0=-most)
        return result


class _RowWriter(_Writer):
    """Into [num_blocks, KV, block_size, d]."""

    def work(self) -> Iterator[None]:
        """Runs, then single tokens, of which the first are loaded before."""
        singles = self.singles()
        loaded = list(islice(singles, AHEAD))
        for tile, rows, heads in self.runs():
            self.store(tile, rows, heads, self.source.run * self.d)
            yield
        while loaded:
            self.store(*loaded.pop(0), self.d)
            loaded += islice(singles, 1)
            yield

    def singles(self) -> Iterator[tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]]:
        """Single tokens [n, features], their rows of the cache and KV heads [n, 1], n <= 128."""
        pairs = single_tokens(self.num_tokens, self.source.run) * self.num_kv_heads
        for i, height in enumerate(tile_heights(pairs)):
            first = self.first_single + 3 * i
            tile = nl.ndarray((height, self.d), dtype=self.rows.dtype, buffer=nl.sbuf)
            if self.source.run:
                gather(self.rows, self.column(first, height), tile)
            else:
                begin = i * PARTITIONS
                nisa.dma_copy(dst=tile, src=self.rows[begin : begin + height, :])
            yield tile, self.column(first + 1, height), self.column(first + 2, height)

    def store(
        self, tile: nl.NkiTensor, rows: nl.NkiTensor, heads: nl.NkiTensor, width: int
    ) -> None:
        """Scale and scatter to rows of `width` elements."""
        num_blocks, num_kv_heads, block_size, d = self.cache.shape
        inverse = self.inverse_of(heads)
        if inverse is not None:
            tile = self.stored(tile, tile.shape, inverse)
        size = num_blocks * num_kv_heads * block_size * d
        scatter(tile, self.cache.reshape((size // width, width)), rows)


class _ColumnWriter(_Writer):
    """Into [num_blocks, KV, d, block_size], whose runs are whole blocks."""

    def __init__(self, source: Source) -> None:
        num_blocks, num_kv_heads, d, self.block_size = source.cache.shape
        itemsize = 4 if source.chunk.dtype == nl.float32 else 2
        super().__init__(source, column_parts(d, self.block_size, itemsize))
        rows = num_blocks * num_kv_heads * self.parts
        self.blocks = self.cache.reshape((rows, self.features * self.block_size))

    def work(self) -> Iterator[None]:
        """Whole blocks, then those that are written in part.

        Tokens of the latter are gathered one by one, while GpSimd waits for whole blocks.
        """
        size, count = self.block_size, self.features
        changes = self.changes()
        for loaded, rows, heads in self.runs():
            height, width = loaded.shape
            columns = loaded.ap([[width, height], [1, count], [count, size]])
            scatter(
                self.stored(columns, (height, width), self.inverse_of(heads)), self.blocks, rows
            )
            yield
            yield from islice(changes, cdiv(size, GATHERS * len(self.run_heights)))
        yield from changes

    def changes(self) -> Iterator[None]:
        """Blocks that are written in part, 128 at a time."""
        width = 2 + self.block_size if self.source.run else 4
        tiles = (self.indices.shape[1] - self.first_single) // width
        pairs = tiles * PARTITIONS
        if self.source.run:
            pairs = EDGE_BLOCKS * self.num_kv_heads * self.parts
        for i, height in enumerate(tile_heights(pairs)):
            yield from self.change_blocks(self.first_single + width * i, height)

    def change_blocks(self, column: int, height: int) -> Iterator[None]:
        """Replace tokens of some blocks of a head."""
        size, count, rows = self.block_size, self.features, self.column(column, height)
        sources, seen = self.new_tokens(column + 2, height)
        number = sources.shape[1]
        tokens: nl.NkiTensor = nl.ndarray(
            (height, number * count), dtype=self.rows.dtype, buffer=nl.sbuf
        )
        for i in range(number):
            gather(self.rows, sources[:, i : i + 1], tokens[:, i * count : (i + 1) * count])
            if (i + 1) % GATHERS == 0:
                yield
        inverse = self.inverse_of(self.column(column + 1, height))
        held = nl.ndarray((height, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=held, data=rows, op0=nl.maximum, operand0=0.0)
        tile = nl.ndarray((height, count * size), dtype=self.cache.dtype, buffer=nl.sbuf)
        gather(self.blocks, held, tile)
        if inverse is not None:
            tokens = self.stored(tokens, tokens.shape, inverse)
        stride = count if number > 1 else 0
        nisa.tensor_copy_predicated(
            dst=tile.ap([[count * size, height], [size, count], [1, size]]),
            src=tokens.ap([[number * count, height], [1, count], [stride, size]]),
            predicate=seen.ap([[size, height], [0, count], [1, size]]),
        )
        scatter(tile, self.blocks, rows)
        yield

    def new_tokens(self, column: int, height: int) -> tuple[nl.NkiTensor, nl.NkiTensor]:
        """What is new in some blocks of a head: rows of the chunk, for each place [n, block_size]
        or one for all [n, 1], and which places are new [n, block_size] uint8.
        """
        size = self.block_size
        seen = nl.ndarray((height, size), dtype=nl.uint8, buffer=nl.sbuf)
        if self.source.run:
            listed = self.indices[0:height, column : column + size]
            nisa.tensor_scalar(dst=seen, data=listed, op0=nl.greater_equal, operand0=0.0)
            sources = nl.ndarray((height, size), dtype=nl.int32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=sources, data=listed, op0=nl.maximum, operand0=0.0)
            return sources, seen
        place = nl.ndarray((height, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=place, src=self.column(column + 1, height))
        places = nl.ndarray((height, size), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(places, [[1, size]], offset=0, channel_multiplier=0)
        nisa.tensor_scalar(dst=seen, data=places, op0=nl.equal, operand0=place)
        return self.column(column, height), seen


def largest_stored(dtype: str) -> float | None:
    """Largest magnitude in a cache of one byte; None: all that its dtype holds."""
    limits = {nl.float8_e4m3: FP8_MAX, nl.float8_e5m2: E5M2_MAX, nl.int8: INT8_MAX}
    return limits.get(dtype)


def gather(hbm: nl.NkiTensor, rows: nl.NkiTensor, tile: nl.NkiTensor) -> None:
    """Rows of [n, m] HBM to a tile."""
    height, width = tile.shape
    nisa.dma_copy(
        dst=tile,
        src=hbm.ap([[width, height], [1, width]], offset=0, vector_offset=rows, indirect_dim=0),
    )


def scatter(tile: nl.NkiTensor, hbm: nl.NkiTensor, rows: nl.NkiTensor) -> None:
    """A tile to rows of [n, m] HBM; nothing of it for row -1."""
    height, width = tile.shape
    nisa.dma_copy(
        dst=hbm.ap([[width, height], [1, width]], offset=0, vector_offset=rows, indirect_dim=0),
        src=tile, oob_mode=nisa.oob_mode.skip,
    )  # fmt: skip
