"""Reading a K cache that is stored pre-transposed, [num_blocks, KV, d, block_size].

Features lie on partitions, up to 128 of them at a time, so that the keys of a block are columns of
a matmul operand as they come: nothing is transposed on the way to the scores. The price is the
size of a descriptor, block_size elements instead of a run of whole rows, and one DMA per block
instead of one per segment, since the partitions of a gather hold features and cannot choose blocks.
Block numbers are scalar offsets; -1 in a block table is out of bounds, so its DMA is skipped.
"""

from ...backend import nisa, nl
from ...sizes import PARTITIONS


def feature_parts(d: int) -> list[tuple[int, int]]:
    """(first feature, features) of each operand: at most 128 features lie on the partitions."""
    parts: list[tuple[int, int]] = []
    for first in range(0, d, PARTITIONS):
        parts.append((first, min(PARTITIONS, d - first)))
    return parts


def queue_of(index: int) -> tuple[nisa.dge_mode, nisa.engine]:
    """Who issues the DMA of a block: many small ones are bound by the issue rate of a queue.

    ACT issues one beside its other work, but would wait for a tile that is not free yet.
    """
    if index % 4 == 0:
        return nisa.dge_mode.hwdge, nisa.engine.sync
    if index % 4 == 1:
        return nisa.dge_mode.hwdge, nisa.engine.scalar
    return nisa.dge_mode.unknown, nisa.engine.unknown


class TransposedKeys(nl.NKIObject):
    """Reads key columns of segments of a paged context, one KV head at a time."""

    def __init__(
        self,
        k_cache: nl.NkiTensor,  # [num_blocks, KV, d, block_size] HBM
        block_table: nl.NkiTensor,  # [1, W] int32 HBM, W whole segments and more
        segment_size: int,
        first_head: nl.NkiTensor | None,  # [128, 1] int32: the cache's head that is head 0
    ) -> None:
        num_blocks, num_kv_heads, d, block_size = k_cache.shape
        self.first_head = first_head
        self.num_kv_heads = num_kv_heads
        self.head_blocks = k_cache.reshape((num_blocks * num_kv_heads, d * block_size))
        self.k_cache = k_cache
        self.block_table = block_table
        self.segment_size = segment_size
        self.block_size = block_size
        self.blocks = segment_size // block_size
        self.parts = feature_parts(d)

    def new_stage(self) -> list[nl.NkiTensor]:
        """Unwritten staging tiles of a segment, [features, segment] per part, in token order."""
        stage: list[nl.NkiTensor] = []
        for part in self.parts:
            shape = (part[1], self.segment_size)
            stage.append(nl.ndarray(shape, dtype=self.k_cache.dtype, buffer=nl.sbuf))
        return stage

    def new_blocks(self) -> nl.NkiTensor:
        """Unwritten blocks of a segment, [1, blocks] int32."""
        return nl.ndarray((1, self.blocks), dtype=nl.int32, buffer=nl.sbuf)

    def fetch_blocks(
        self,
        first_block: nl.NkiTensor,  # [1, 1] int32 SBUF: the segment's place in the table
        blocks: nl.NkiTensor,  # from new_blocks, result
    ) -> None:
        """Read the blocks of a segment."""
        nisa.dma_copy(
            dst=blocks,
            src=self.block_table.ap(
                [[self.blocks, 1], [1, self.blocks]],
                offset=0, scalar_offset=first_block, indirect_dim=1,
            ),
        )  # fmt: skip

    def gather(
        self,
        blocks: nl.NkiTensor,  # [1, blocks] int32 from fetch_blocks
        kv_head: int,
        stage: list[nl.NkiTensor],  # from new_stage, result
        first: int,
        count: int,
    ) -> None:
        """Load the columns of some blocks of a segment; those of a skipped one stay as they are."""
        if self.first_head is not None:
            of_head = self.blocks_of_head(blocks, self.first_head)
            self.gather_blocks(self.head_blocks, of_head, kv_head, stage, first, count)
        else:
            self.gather_blocks(self.k_cache, blocks, kv_head, stage, first, count)

    def blocks_of_head(self, blocks: nl.NkiTensor, first_head: nl.NkiTensor) -> nl.NkiTensor:
        """Numbers of a head's blocks among those of all heads; negative for -1."""
        of_head = nl.ndarray(blocks.shape, dtype=nl.int32, buffer=nl.sbuf)
        heads = nl.ndarray(blocks.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=heads, value=self.num_kv_heads)
        nisa.tensor_tensor(dst=of_head, data1=blocks, data2=heads, op=nl.multiply)
        nisa.tensor_tensor(
            dst=of_head, data1=of_head,
            data2=first_head.ap([[1, 1], [0, self.blocks]]), op=nl.add,
        )  # fmt: skip
        return of_head

    def gather_blocks(
        self,
        blocks_in_hbm: nl.NkiTensor,  # the first dimension counts blocks, or heads' blocks
        blocks: nl.NkiTensor,  # [1, blocks] int32
        kv_head: int,
        stage: list[nl.NkiTensor],
        first_block: int,
        count: int,
    ) -> None:
        """One DMA per block."""
        _, _, d, block_size = self.k_cache.shape
        for i in range(len(self.parts)):
            first, height = self.parts[i]
            for block in range(first_block, first_block + count):
                mode, engine = queue_of(block)
                nisa.dma_copy(
                    dst=stage[i][:, block * block_size : (block + 1) * block_size],
                    src=blocks_in_hbm.ap(
                        [[block_size, height], [1, block_size]],
                        offset=(kv_head * d + first) * block_size,
                        scalar_offset=blocks[:, block : block + 1],
                        indirect_dim=0,
                    ),
                    oob_mode=nisa.oob_mode.skip,
                    dge_mode=mode,
                    engine=engine,
                )

    def in_tile_order(self, tokens: nl.NkiTensor, first_tile: int, num_tiles: int) -> nl.NkiTensor:
        """Columns [p, segment] in token order as those of key tiles, [p, tiles, 128].

        Column p of key tile j is token p * (segment / 128) + j, as in the values.
        """
        step = self.segment_size // PARTITIONS
        return tokens.ap(
            [[self.segment_size, tokens.shape[0]], [1, num_tiles], [step, PARTITIONS]],
            offset=first_tile,
        )

    def write_columns(
        self,
        stage: list[nl.NkiTensor],
        exists: nl.NkiTensor | None,  # [128, segment] uint8, token order; None: all are finite
        first_tile: int,
        num_tiles: int,
        columns: list[nl.NkiTensor],  # [features, segment] per part, result
    ) -> None:
        """Key columns of some tiles in the dtype of `columns`, zero where no token exists."""
        begin, end = first_tile * PARTITIONS, (first_tile + num_tiles) * PARTITIONS
        for i in range(len(stage)):
            part = columns[i]
            source = self.in_tile_order(stage[i], first_tile, num_tiles)
            if exists is None:
                nisa.tensor_copy(dst=part[:, begin:end], src=source)
            else:
                predicate = exists[0 : stage[i].shape[0], :]
                nisa.select_reduce(
                    dst=part[:, begin:end],
                    predicate=self.in_tile_order(predicate, first_tile, num_tiles),
                    on_true=source,
                    on_false=0.0,
                )
