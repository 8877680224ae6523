"""Reading and writing the paged KV cache: row indices on chip, gathers, scatters.

The cache [num_blocks, KV, block_size, d] is seen as rows of `run` tokens, [rows, run * d], where
`run` tokens of one KV head follow each other. A segment of the context is spread over partitions:
partition p holds the tokens p * r .. p * r + r - 1, r = segment / 128, as r / run such rows.
Row numbers are int32 arithmetic on GpSimd, exact over the whole int32 range; -1 in a block table
or slot mapping gives a negative row, which is out of bounds, so its transfer is skipped.
"""

from .backend import nisa, nl
from .loading import zero_rows
from .masks import present_tokens, segment_partition_positions, segment_positions
from .tile_schedule import PARTITIONS, cache_run


def integer_multiple(numbers: nl.NkiTensor, factor: int) -> nl.NkiTensor:
    """Exact int32 product of `numbers` [128, n] and a constant; a scalar operand means fp32."""
    product = nl.ndarray(numbers.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=product, value=factor)
    nisa.tensor_tensor(dst=product, data1=numbers, data2=product, op=nl.multiply)
    return product


class PagedSegments(nl.NKIObject):
    """Reads segments of a paged context, for `num_heads` KV heads at a time.

    Holds what all segments share: geometry, constant tiles and the staging tiles of the gathers.
    A skipped gather leaves its rows as they are; what they hold is dropped by a select.
    """

    def __init__(
        self,
        k_cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d] HBM
        v_cache: nl.NkiTensor,
        block_tables: nl.NkiTensor,  # [B, W] int32 HBM, W whole segments
        segment_size: int,
        num_heads: int,
    ) -> None:
        num_blocks, num_kv_heads, block_size, d = k_cache.shape
        self.block_tables = block_tables
        self.segment_size = segment_size
        self.num_heads = num_heads
        self.block_size = block_size
        self.d = d
        self.tokens = segment_size // PARTITIONS
        self.run = cache_run(block_size, self.tokens)
        self.runs = self.tokens // self.run
        self.runs_per_block = block_size // self.run
        self.blocks = segment_size // block_size
        rows = num_blocks * num_kv_heads * self.runs_per_block
        self.k_runs = k_cache.reshape((rows, self.run * d))
        self.v_runs = v_cache.reshape((rows, self.run * d))
        self.positions = segment_positions(segment_size)
        self.partition_positions = segment_partition_positions(self.tokens)
        self.run_of_block = nl.ndarray((PARTITIONS, self.runs), dtype=nl.int32, buffer=nl.sbuf)
        nisa.iota(self.run_of_block, [[1, self.runs]], offset=0, channel_multiplier=self.runs)
        nisa.tensor_scalar(
            dst=self.run_of_block, data=self.run_of_block, op0=nl.bitwise_and,
            operand0=self.runs_per_block - 1,
        )  # fmt: skip
        self.block_rows = nl.ndarray((PARTITIONS, self.runs), dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=self.block_rows, value=num_kv_heads * self.runs_per_block)
        width = num_heads * self.tokens * d
        self.k_stage = nl.ndarray((PARTITIONS, width), dtype=k_cache.dtype, buffer=nl.sbuf)
        self.v_stage = nl.ndarray((PARTITIONS, width), dtype=v_cache.dtype, buffer=nl.sbuf)
        nisa.memset(dst=self.k_stage, value=0.0)
        nisa.memset(dst=self.v_stage, value=0.0)

    def load(
        self,
        request: int,
        first_block: nl.NkiTensor,  # [1, 1] int32 SBUF: logical block of the segment's start
        remaining: nl.NkiTensor,  # [128, 1] fp32: tokens of the context from there on
        first_head: int,
    ) -> tuple[nl.NkiTensor, nl.NkiTensor, nl.NkiTensor]:
        """Keys and values [128, (head, token, d)], zero where absent, and the mask of tokens.

        The mask [128, segment] uint8 is in token order, the same on all partitions.
        """
        by_partition = nl.ndarray((PARTITIONS, self.runs), dtype=nl.int32, buffer=nl.sbuf)
        by_token = nl.ndarray((PARTITIONS, self.blocks), dtype=nl.int32, buffer=nl.sbuf)
        table = self.block_tables
        start = request * table.shape[1]
        nisa.dma_copy(
            dst=by_partition,
            src=table.ap(
                [[1, self.blocks], [0, self.runs_per_block]],
                offset=start, scalar_offset=first_block, indirect_dim=1,
            ),
        )  # fmt: skip
        nisa.dma_copy(
            dst=by_token,
            src=table.ap(
                [[0, PARTITIONS], [1, self.blocks]],
                offset=start, scalar_offset=first_block, indirect_dim=1,
            ),
        )  # fmt: skip
        rows = nl.ndarray((PARTITIONS, self.runs), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=rows, data1=by_partition, data2=self.block_rows, op=nl.multiply)
        nisa.tensor_tensor(dst=rows, data1=rows, data2=self.run_of_block, op=nl.add)
        self.gather(self.k_runs, rows, first_head, self.k_stage)
        self.gather(self.v_runs, rows, first_head, self.v_stage)

        present = present_tokens(
            self.partition_positions,
            remaining,
            by_partition.ap([[self.runs, PARTITIONS], [1, self.runs], [0, self.run]]),
        )
        each_element = present.ap(
            [[self.tokens, PARTITIONS], [0, self.num_heads], [1, self.tokens], [0, self.d]]
        )
        keys = zero_rows(self.k_stage, each_element)
        values = zero_rows(self.v_stage, each_element)
        seen = present_tokens(
            self.positions,
            remaining,
            by_token.ap([[self.blocks, PARTITIONS], [1, self.blocks], [0, self.block_size]]),
        )
        return keys, values, seen

    def gather(
        self,
        cache_runs: nl.NkiTensor,  # [rows, run * d] HBM
        rows: nl.NkiTensor,  # [128, runs] int32: the row of each run, for KV head 0
        first_head: int,
        stage: nl.NkiTensor,  # [128, heads * tokens * d] SBUF, result
    ) -> None:
        """One gather per run of a partition, all KV heads in it."""
        width = self.run * self.d
        per_head = self.tokens * self.d
        head_stride = self.block_size * self.d
        for run in range(self.runs):
            nisa.dma_copy(
                dst=stage.ap(
                    [[stage.shape[1], PARTITIONS], [per_head, self.num_heads], [1, width]],
                    offset=run * width,
                ),
                src=cache_runs.ap(
                    [[width, PARTITIONS], [head_stride, self.num_heads], [1, width]],
                    offset=first_head * head_stride,
                    vector_offset=rows[:, run : run + 1],
                    indirect_dim=0,
                ),
                oob_mode=nisa.oob_mode.skip,
            )

    def mask_columns(
        self, seen: nl.NkiTensor, num_rows: int, first_tile: int, num_tiles: int
    ) -> nl.NkiTensor:
        """The first rows of a mask of `load` in the column order of key tiles, [rows, keys]."""
        return seen.ap(
            [[self.segment_size, num_rows], [1, num_tiles], [self.tokens, PARTITIONS]],
            offset=first_tile,
        )

    def advance(self, first_block: nl.NkiTensor, remaining: nl.NkiTensor) -> None:
        """Move the loop state of `load` to the next segment."""
        nisa.tensor_scalar(
            dst=remaining, data=remaining, op0=nl.subtract, operand0=float(self.segment_size)
        )
        nisa.tensor_scalar(
            dst=first_block, data=first_block, op0=nl.add, operand0=float(self.blocks)
        )


def slot_rows(
    slot_mapping: nl.NkiTensor,  # [tokens] int32 HBM
    first_token: int,
    num_rows: int,
    num_tiles: int,
    block_size: int,
    num_kv_heads: int,
) -> nl.NkiTensor:
    """Cache row of KV head 0 for each token, [rows, tiles] int32: token first + t * 128 + p.

    row = slot + (slot - slot % block_size) * (KV - 1), which stays negative for slot -1.
    """
    slots = nl.ndarray((num_rows, num_tiles), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(
        dst=slots,
        src=slot_mapping.ap([[1, num_rows], [PARTITIONS, num_tiles]], offset=first_token),
    )
    block_start = nl.ndarray((num_rows, num_tiles), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=block_start, data=slots, op0=nl.bitwise_and, operand0=-block_size)
    rows = integer_multiple(block_start, num_kv_heads - 1)
    nisa.tensor_tensor(dst=rows, data1=rows, data2=slots, op=nl.add)
    return rows


def scatter_chunk(
    chunk: nl.NkiTensor,  # [KV, tokens, d] HBM, any number of tokens
    cache: nl.NkiTensor,  # [num_blocks, KV, block_size, d] HBM
    rows: nl.NkiTensor,  # [128, tiles] int32 from slot_rows
    first_token: int,
) -> None:
    """Store the tokens of one slot_rows tile, all KV heads of a token in one descriptor row."""
    num_kv_heads, num_tokens, d = chunk.shape
    num_blocks, _, block_size, _ = cache.shape
    num_rows, num_tiles = rows.shape
    cache_rows = cache.reshape((num_blocks * num_kv_heads * block_size, d))
    for t in range(num_tiles):
        token = first_token + t * PARTITIONS
        nisa.dma_copy(
            dst=cache_rows.ap(
                [[d, num_rows], [block_size * d, num_kv_heads], [1, d]],
                offset=0,
                vector_offset=rows[:, t : t + 1],
                indirect_dim=0,
            ),
            src=chunk.ap([[d, num_rows], [num_tokens * d, num_kv_heads], [1, d]], offset=token * d),
            oob_mode=nisa.oob_mode.skip,
        )
