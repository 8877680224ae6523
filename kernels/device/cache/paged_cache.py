"""Reading and writing the paged KV cache: row indices on chip, gathers, scatters.

The cache [num_blocks, KV, block_size, d] is seen as rows of `run` tokens, [rows, run * d], where
`run` tokens of one KV head follow each other. A segment of the context is spread over partitions:
partition p holds the tokens p * r .. p * r + r - 1, r = segment / 128, as r / run such rows.
Row numbers are int32 arithmetic on GpSimd, exact over the whole int32 range; -1 in a block table
or slot mapping gives a negative row, which is out of bounds, so its transfer is skipped.
"""

from dataclasses import dataclass

from ....reference.attention import FP8_MAX
from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..masks import positions_on_partitions, present_tokens
from ..tile_schedule import cache_run
from .transposed_keys import TransposedKeys


@dataclass
class Walk(nl.NKIObject):
    """Loop state on the way through one request's context, relative to the current segment."""

    first_block: nl.NkiTensor  # [1, 1] int32 SBUF: logical block of the segment's first token
    counts: nl.NkiTensor  # [128, 1] fp32: tokens left
    skipped: nl.NkiTensor | None = None  # [128, 1] fp32: so many of the next ones are left out


@dataclass
class SegmentBlocks(nl.NKIObject):
    """Blocks of a segment, -1 where absent, int32 SBUF."""

    by_run: nl.NkiTensor  # [128, runs]: block of each run of a partition
    in_row: nl.NkiTensor | None  # [1, blocks], for a pre-transposed K cache
    seen: nl.NkiTensor | None = None  # [128, tokens] uint8: those that exist, of a window's section


class PagedSegments(nl.NKIObject):
    """Reads segments of a paged context, one KV head at a time.

    Holds what all segments share: geometry and constant tiles. A skipped gather leaves its rows as
    they are; what they hold is dropped by a select or a product with zero.
    """

    def __init__(
        self,
        k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d] HBM
        v_cache: nl.NkiTensor,
        block_table: nl.NkiTensor,  # [1, W] int32 HBM, W whole segments and more
        segment_size: int,
        dtype: str,  # of the keys and values that come out
        k_pre_transposed: bool,  # k_cache is [num_blocks, KV, d, block_size]
        first_head: nl.NkiTensor | None,  # [128, 1] int32: the cache's head that is head 0
    ) -> None:
        num_blocks, num_kv_heads, block_size, d = v_cache.shape
        self.block_table = block_table
        self.segment_size = segment_size
        self.block_size = block_size
        self.d = d
        self.dtype = dtype
        self.fetch_steps = 1
        # Who sees a segment sees those before it.
        self.seen_in_part = False
        self.tokens = segment_size // PARTITIONS
        self.run = cache_run(block_size, self.tokens)
        self.runs = self.tokens // self.run
        self.runs_per_block = block_size // self.run
        self.blocks = segment_size // block_size
        rows = num_blocks * num_kv_heads * self.runs_per_block
        self.k_runs = k_cache.reshape((rows, self.run * d))
        self.k_dtype = k_cache.dtype
        self.v_dtype = v_cache.dtype
        self.key_columns: TransposedKeys | None = None
        if k_pre_transposed:
            self.key_columns = TransposedKeys(k_cache, block_table, segment_size, first_head)
            # Written by write_positions, where masks in token order are needed.
            shape = (PARTITIONS, segment_size)
            self.positions = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.v_runs = v_cache.reshape((rows, self.run * d))
        self.partition_positions = positions_on_partitions(self.tokens)
        self.run_of_block = nl.ndarray((PARTITIONS, self.runs), dtype=nl.int32, buffer=nl.sbuf)
        nisa.iota(self.run_of_block, [[1, self.runs]], offset=0, channel_multiplier=self.runs)
        nisa.tensor_scalar(
            dst=self.run_of_block, data=self.run_of_block, op0=nl.bitwise_and,
            operand0=self.runs_per_block - 1,
        )  # fmt: skip
        if first_head is not None:
            add_head(self.run_of_block, first_head, self.runs_per_block)
        self.block_rows = nl.ndarray((PARTITIONS, self.runs), dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=self.block_rows, value=num_kv_heads * self.runs_per_block)
        self.block_step = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=self.block_step, value=self.blocks)

    def new_key_stage(self) -> list[nl.NkiTensor]:
        """Unwritten tiles for the keys of a segment as they come out of the cache.

        Rows [128, (token, d)], or per 128 features columns [features, segment].
        """
        if self.key_columns is not None:
            return self.key_columns.new_stage()
        shape = (PARTITIONS, self.tokens * self.d)
        return [nl.ndarray(shape, dtype=self.k_dtype, buffer=nl.sbuf)]

    def new_blocks(self) -> SegmentBlocks:
        """Unwritten blocks of a segment."""
        by_run = nl.ndarray((PARTITIONS, self.runs), dtype=nl.int32, buffer=nl.sbuf)
        in_row = None
        if self.key_columns is not None:
            in_row = self.key_columns.new_blocks()
        return SegmentBlocks(by_run, in_row)

    def write_positions(self) -> None:
        """Fill `positions`, [128, segment] fp32: 0, 1, 2, ... on every partition."""
        nisa.iota(self.positions, [[1, self.segment_size]], offset=0, channel_multiplier=0)

    def new_walk(self, counts: nl.NkiTensor) -> Walk:
        """Begin at the first token; counts [128, 1] fp32, consumed by partial segments."""
        first_block = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=first_block, value=0, engine=nisa.engine.gpsimd)
        return Walk(first_block, counts)

    def skip_to(self, walk: Walk, position: nl.NkiTensor, alignment: int) -> nl.NkiTensor:
        """Begin at or before a position [128, 1] fp32 instead, at a multiple of `alignment`.

        Returns where, [128, 1] fp32; 0 for a negative position.
        """
        index, token = aligned_down(position, alignment)
        nisa.tensor_scalar(dst=walk.counts, data=walk.counts, op0=nl.subtract, operand0=token)
        nisa.tensor_scalar(
            dst=walk.first_block, data=index[0:1, :], op0=nl.multiply,
            operand0=float(alignment // self.block_size),
        )  # fmt: skip
        return token

    def fetch_blocks(
        self,
        walk: Walk,
        blocks: SegmentBlocks,  # from new_blocks, result
    ) -> None:
        """Read the blocks of a segment."""
        if self.key_columns is not None and blocks.in_row is not None:
            self.key_columns.fetch_blocks(walk.first_block, blocks.in_row)
        nisa.dma_copy(
            dst=blocks.by_run,
            src=self.block_table.ap(
                [[1, self.blocks], [0, self.runs_per_block]],
                offset=0, scalar_offset=walk.first_block, indirect_dim=1,
            ),
            dge_mode=nisa.dge_mode.hwdge, engine=nisa.engine.sync,
        )  # fmt: skip

    def fetch_rows(
        self,
        walk: Walk,
        blocks: SegmentBlocks,  # from fetch_blocks
        kv_head: int,
        k_stage: list[nl.NkiTensor],  # from new_key_stage, result
        v_stage: nl.NkiTensor,  # [128, tokens * d] SBUF, result
        part: int,  # there is one
    ) -> None:
        """Gather a segment into staging tiles."""
        rows = nl.ndarray((PARTITIONS, self.runs), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=rows, data1=blocks.by_run, data2=self.block_rows, op=nl.multiply)
        nisa.tensor_tensor(dst=rows, data1=rows, data2=self.run_of_block, op=nl.add)
        if self.key_columns is not None and blocks.in_row is not None:
            self.key_columns.gather(blocks.in_row, kv_head, k_stage, 0, self.blocks)
        else:
            self.gather(self.k_runs, rows, kv_head, k_stage[0])
        self.gather(self.v_runs, rows, kv_head, v_stage)

    def mark_present(
        self,
        walk: Walk,
        blocks: SegmentBlocks,  # from fetch_blocks
        present: nl.NkiTensor,  # [128, tokens] uint8 SBUF, result
    ) -> None:
        """Which tokens of a fetched segment exist and are mapped."""
        present_tokens(
            self.partition_positions,
            walk.counts,
            blocks.by_run.ap([[self.runs, PARTITIONS], [1, self.runs], [0, self.run]]),
            present,
        )
        if walk.skipped is not None:
            nisa.scalar_tensor_tensor(
                dst=present, data=self.partition_positions, op0=nl.greater_equal,
                operand0=walk.skipped, op1=nl.multiply, operand1=present,
            )  # fmt: skip

    def mark_existing(
        self,
        walk: Walk,
        existing: nl.NkiTensor,  # [128, segment] uint8 SBUF, result
    ) -> None:
        """Which tokens of a segment exist and are not skipped, mapped or not, in token order on
        every partition.
        """
        nisa.tensor_scalar(dst=existing, data=self.positions, op0=nl.less, operand0=walk.counts)
        if walk.skipped is not None:
            nisa.scalar_tensor_tensor(
                dst=existing, data=self.positions, op0=nl.greater_equal, operand0=walk.skipped,
                op1=nl.multiply, operand1=existing,
            )  # fmt: skip

    def gather(
        self,
        cache_runs: nl.NkiTensor,  # [rows, run * d] HBM
        rows: nl.NkiTensor,  # [128, runs] int32: the row of each run, for KV head 0
        kv_head: int,
        stage: nl.NkiTensor,  # [128, tokens * d] SBUF, result
    ) -> None:
        """One gather per run of a partition."""
        width = self.run * self.d
        for run in range(self.runs):
            nisa.dma_copy(
                dst=stage[:, run * width : (run + 1) * width],
                src=cache_runs.ap(
                    [[width, PARTITIONS], [1, width]],
                    offset=kv_head * self.block_size * self.d,
                    vector_offset=rows[:, run : run + 1], indirect_dim=0,
                ),
                oob_mode=nisa.oob_mode.skip,
            )  # fmt: skip

    def advance_counts(self, walk: Walk) -> None:
        """Move the counts on to the next segment."""
        nisa.tensor_scalar(
            dst=walk.counts, data=walk.counts, op0=nl.subtract, operand0=float(self.segment_size)
        )
        if walk.skipped is not None:
            nisa.tensor_scalar(
                dst=walk.skipped, data=walk.skipped, op0=nl.subtract,
                operand0=float(self.segment_size),
            )  # fmt: skip

    def advance_block(self, walk: Walk) -> None:
        """Move the first block on to the next segment."""
        nisa.tensor_tensor(
            dst=walk.first_block, data1=walk.first_block, data2=self.block_step, op=nl.add
        )


def aligned_down(
    position: nl.NkiTensor,  # [128, 1] fp32
    alignment: int,
) -> tuple[nl.NkiTensor, nl.NkiTensor]:
    """floor(position / alignment) [128, 1] int32 and that times alignment in fp32; 0 if negative.

    The floor is a rounded quotient: the cast to int32 rounds to nearest.
    """
    quotient = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=quotient, data=position, op0=nl.maximum, operand0=0.0, op1=nl.multiply,
        operand1=1.0 / alignment,
    )  # fmt: skip
    index = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=index, data=quotient, op0=nl.subtract, operand0=0.5 - 0.5 / alignment)
    token = nl.ndarray((PARTITIONS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=token, data=index, op0=nl.multiply, operand0=float(alignment))
    return index, token


def load_tokens(register: nisa.VirtualRegister, token: nl.NkiTensor) -> None:
    """A whole number [128, 1] fp32 into a register, for loop bounds."""
    number = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=number, src=token[0:1, :])
    nisa.register_load(register, number)


def add_head(indices: nl.NkiTensor, head: nl.NkiTensor, stride: int) -> None:
    """Add `stride` times a head's number [p, 1] int32 to every index of a tile [p, n] int32."""
    height, width = indices.shape
    offset = integer_multiple(head[0:height, :], stride)
    nisa.tensor_tensor(
        dst=indices, data1=indices, data2=offset.ap([[1, height], [0, width]]), op=nl.add
    )


def integer_multiple(numbers: nl.NkiTensor, factor: int) -> nl.NkiTensor:
    """Exact int32 product of `numbers` [128, n] and a constant; a scalar operand means fp32."""
    product = nl.ndarray(numbers.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=product, value=factor)
    nisa.tensor_tensor(dst=product, data1=numbers, data2=product, op=nl.multiply)
    return product


def to_cache_dtype(values: nl.NkiTensor, stored: nl.NkiTensor) -> None:
    """Cast fp32 values to the dtype of `stored`, held within +-240 for fp8."""
    if stored.dtype == nl.float8_e4m3:
        nisa.tensor_scalar(
            dst=stored, data=values, op0=nl.minimum, operand0=FP8_MAX, op1=nl.maximum,
            operand1=-FP8_MAX,
        )  # fmt: skip
    else:
        nisa.tensor_copy(dst=stored, src=values)


def slot_rows(
    slot_mapping: nl.NkiTensor,  # [tokens] int32 HBM
    first_token: int,
    num_rows: int,
    num_tiles: int,
    block_size: int,
    num_kv_heads: int,
) -> nl.NkiTensor:
    """Cache row of KV head 0 for each token, [rows, tiles] int32: token first + t * 128 + p."""
    slots = nl.ndarray((num_rows, num_tiles), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=slots,
        src=slot_mapping.ap([[1, num_rows], [PARTITIONS, num_tiles]], offset=first_token),
    )
    return rows_of_slots(slots, block_size, num_kv_heads)


def rows_of_slots(slots: nl.NkiTensor, block_size: int, num_kv_heads: int) -> nl.NkiTensor:
    """Cache row of KV head 0 for each slot of an int32 tile.

    row = slot + (slot - slot % block_size) * (KV - 1), which stays negative for slot -1.
    """
    block_start = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=block_start, data=slots, op0=nl.bitwise_and, operand0=-block_size)
    rows = integer_multiple(block_start, num_kv_heads - 1)
    nisa.tensor_tensor(dst=rows, data1=rows, data2=slots, op=nl.add)
    return rows


def scatter_rows(
    rows: nl.NkiTensor,  # [tokens, 1] int32 from slot_rows
    tokens: nl.NkiTensor,  # tokens x KV x d, HBM or SBUF
    cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d] HBM
) -> None:
    """Store up to 128 tokens, all KV heads of a token in one descriptor row."""
    num_blocks, num_kv_heads, block_size, d = cache.shape
    cache_rows = cache.reshape((num_blocks * num_kv_heads * block_size, d))
    nisa.dma_copy(
        dst=cache_rows.ap(
            [[d, rows.shape[0]], [block_size * d, num_kv_heads], [1, d]],
            offset=0, vector_offset=rows, indirect_dim=0,
        ),
        src=tokens,
        oob_mode=nisa.oob_mode.skip,
    )  # fmt: skip
