"""Segments of a paged context, found through a block table on the chip.

The cache [num_blocks, KV, block_size, d] is seen as rows of `run` tokens, [rows, run * d], where
`run` tokens of one KV head follow each other. A segment is spread over partitions: partition p
holds the tokens p * r .. p * r + r - 1, r = segment / 128, as r / run such rows. Row numbers are
int32 arithmetic on GpSimd, exact over the whole int32 range. In the place of an absent block row 0
is read, and selected away: a gather that skips rows in a device loop may not compile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..masks import positions_on_partitions, present_tokens
from ..tile_schedule import cache_run
from .key_columns import KeyColumns, StagedColumns
from .key_source import KeyRows, KeySource, Stage, StageOptions
from .on_chip import sbuf


@dataclass(frozen=True)
class PagedCache:
    """Arguments of a kernel in HBM."""

    k_cache: nl.NkiTensor
    """[num_blocks, KV, block_size, d], or with k_pre_transposed [num_blocks, KV, d, block_size]."""
    v_cache: nl.NkiTensor
    """[num_blocks, KV, block_size, d]."""
    block_table: nl.NkiTensor
    """[1, W] int32, W whole segments and more."""
    k_pre_transposed: bool

    @property
    def key_dim(self) -> int:
        """Features of a key."""
        size: int = self.k_cache.shape[2 if self.k_pre_transposed else 3]
        return size

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        size: int = self.v_cache.shape[2]
        return size


@dataclass
class Walk:
    """Loop state on the way through the context, relative to the next segment."""

    first_block: nl.NkiTensor
    """[1, 1] int32: logical block of the first token of the segment that is gathered next."""
    counts: nl.NkiTensor
    """[128, 1] fp32: tokens from the segment on that is made next."""
    skipped: nl.NkiTensor | None = None
    """[128, 1] fp32: so many of the next ones are left out."""


class PagedSegments(KeySource):
    """What all segments of a size share: geometry and constant tiles."""

    def __init__(self, cache: PagedCache, segment_size: int) -> None:
        num_blocks, num_kv_heads, block_size, self.value_dim = cache.v_cache.shape
        self.cache = cache
        self.segment_size = segment_size
        self.d = cache.key_dim
        self.tiles = segment_size // PARTITIONS
        self.run = cache_run(block_size, self.tiles)
        self.runs = self.tiles // self.run
        self.runs_per_block = block_size // self.run
        self.num_blocks = segment_size // block_size
        rows = num_blocks * num_kv_heads * self.runs_per_block
        self.v_runs = cache.v_cache.reshape((rows, self.run * self.value_dim))
        self.k_runs = cache.k_cache.reshape((rows, self.run * self.d))
        self.partition_positions = positions_on_partitions(self.tiles)
        self.run_of_block = sbuf((PARTITIONS, self.runs), nl.int32)
        nisa.iota(self.run_of_block, [[1, self.runs]], offset=0, channel_multiplier=self.runs)
        nisa.tensor_scalar(
            dst=self.run_of_block, data=self.run_of_block, op0=nl.bitwise_and,
            operand0=self.runs_per_block - 1,
        )  # fmt: skip
        self.block_rows = sbuf((PARTITIONS, self.runs), nl.int32)
        nisa.memset(dst=self.block_rows, value=num_kv_heads * self.runs_per_block)
        self.lowest_row = sbuf((PARTITIONS, self.runs), nl.int32)
        nisa.memset(dst=self.lowest_row, value=0)
        self.block_stride = sbuf((1, 1), nl.int32)
        nisa.memset(dst=self.block_stride, value=self.num_blocks)

    def stage(self, kv_head: int, options: StageOptions) -> "PagedStage":
        """New staged rows."""
        return PagedStage(self, kv_head, options)

    def rows_of(self, blocks: nl.NkiTensor, kv_head: int) -> nl.NkiTensor:
        """Cache row of each run of a KV head, [128, runs] int32; 0 where the block is absent."""
        rows = sbuf((PARTITIONS, self.runs), nl.int32)
        nisa.tensor_tensor(dst=rows, data1=blocks, data2=self.block_rows, op=nl.multiply)
        nisa.tensor_tensor(dst=rows, data1=rows, data2=self.run_of_block, op=nl.add)
        if kv_head:
            head = sbuf((PARTITIONS, self.runs), nl.int32)
            nisa.memset(dst=head, value=kv_head * self.runs_per_block)
            nisa.tensor_tensor(dst=rows, data1=rows, data2=head, op=nl.add)
        nisa.tensor_tensor(
            dst=rows, data1=rows, data2=self.lowest_row, op=nl.maximum, engine=nisa.engine.gpsimd
        )
        return rows

    def gather(self, cache_runs: nl.NkiTensor, rows: nl.NkiTensor, stage: nl.NkiTensor) -> None:
        """One gather per run of a partition into [128, tiles * d]."""
        width = stage.shape[1] // self.runs
        for run in range(self.runs):
            nisa.dma_copy(
                dst=stage[:, run * width : (run + 1) * width],
                src=cache_runs.ap(
                    [[width, PARTITIONS], [1, width]], offset=0,
                    vector_offset=rows[:, run : run + 1], indirect_dim=0,
                ),
            )  # fmt: skip


class PagedStage(Stage):
    """One KV head's way through the context."""

    def __init__(self, source: PagedSegments, kv_head: int, options: StageOptions) -> None:
        cache = source.cache
        super().__init__(source.runs, source.tiles, source.value_dim, cache.v_cache.dtype, options)
        self._source, self._kv_head = source, kv_head
        self.walk = Walk(sbuf((1, 1), nl.int32), sbuf((PARTITIONS, 1)))
        self._columns: KeyColumns | None = None
        if cache.k_pre_transposed:
            staged = StagedColumns(cache.k_cache, kv_head, source.num_blocks)
            self._columns = KeyColumns(staged, self.walk)
            self.keys = self._columns
            return
        rows = sbuf((PARTITIONS, source.tiles * source.d), cache.k_cache.dtype)
        self._rows = rows
        self.keys = KeyRows(rows, options.dtype, self.facts, options.first_key)

    def begin(self, counts: nl.NkiTensor, first_block: nl.NkiTensor | None) -> None:
        """Begin at a logical block [1, 1] int32 (None: 0), with `counts` [128, 1] fp32 to come."""
        nisa.tensor_copy(dst=self.walk.counts, src=counts)
        if first_block is None:
            nisa.memset(dst=self.walk.first_block, value=0, engine=nisa.engine.gpsimd)
        else:
            nisa.tensor_copy(dst=self.walk.first_block, src=first_block)

    def fetch(self) -> Iterator[None]:
        """Read the table, then gather; the next segment is the one to be fetched then."""
        source = self._source
        table = source.cache.block_table
        nisa.dma_copy(
            dst=self.facts.blocks,
            src=table.ap(
                [[1, source.num_blocks], [0, source.runs_per_block]],
                offset=0, scalar_offset=self.walk.first_block, indirect_dim=1,
            ),
            dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.sync,
        )  # fmt: skip
        if self._columns is not None:
            self._columns.read_table(table, self.walk.first_block)
        yield
        rows = source.rows_of(self.facts.blocks, self._kv_head)
        if self._columns is not None:
            self._columns.staged.gather(0, source.num_blocks)
        else:
            source.gather(source.k_runs, rows, self._rows)
        source.gather(source.v_runs, rows, self.values)
        nisa.tensor_tensor(
            dst=self.walk.first_block, data1=self.walk.first_block, data2=source.block_stride,
            op=nl.add,
        )  # fmt: skip
        yield

    def mark(self) -> None:
        """Tokens below the count in mapped blocks, but for those that are left out."""
        source, walk, present = self._source, self.walk, self.facts.present
        present_tokens(
            source.partition_positions, walk.counts,
            self.facts.blocks.ap(
                [[source.runs, PARTITIONS], [1, source.runs], [0, source.run]]
            ),
            present,
        )  # fmt: skip
        self.keys.mark()
        counted = [walk.counts]
        if walk.skipped is not None:
            nisa.scalar_tensor_tensor(
                dst=present, data=source.partition_positions, op0=nl.greater_equal,
                operand0=walk.skipped, op1=nl.multiply, operand1=present,
            )  # fmt: skip
            counted.append(walk.skipped)
        for tokens in counted:
            nisa.tensor_scalar(
                dst=tokens, data=tokens, op0=nl.subtract, operand0=float(source.segment_size)
            )


def aligned_down(
    position: nl.NkiTensor,  # [128, 1] fp32
    alignment: int,
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """floor(position / alignment) [128, 1] int32 and that times alignment in fp32; 0 if negative.

    The floor is a rounded quotient: the cast to int32 rounds to nearest.
    """
    quotient = sbuf((PARTITIONS, 1))
    nisa.tensor_scalar(
        dst=quotient, data=position, op0=nl.maximum, operand0=0.0, op1=nl.multiply,
        operand1=1.0 / alignment,
    )  # fmt: skip
    index = sbuf((PARTITIONS, 1), nl.int32)
    nisa.tensor_scalar(dst=index, data=quotient, op0=nl.subtract, operand0=0.5 - 0.5 / alignment)
    token = sbuf((PARTITIONS, 1))
    nisa.tensor_scalar(dst=token, data=index, op0=nl.multiply, operand0=float(alignment))
    return index, token


def load_number(register: nisa.VirtualRegister, number: nl.NkiTensor) -> None:
    """A whole number [128, 1] fp32 into a register, for loop bounds."""
    integer = sbuf((1, 1), nl.int32)
    nisa.tensor_copy(dst=integer, src=number[0:1, :])
    nisa.register_load(register, integer)
