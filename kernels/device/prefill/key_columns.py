"""Cached keys that are stored pre-transposed, [num_blocks, KV, d, block_size].

Features lie on partitions, up to 128 of them at a time, so that the keys of a block are columns of
a matmul operand as they come: nothing is transposed on the way to the scores. The price is the
size of a descriptor, block_size elements instead of a run of whole rows, and one DMA per block
instead of one per segment, since the partitions of a gather hold features and cannot choose blocks.
Block numbers are scalar offsets; for an absent block block 0 is read, and selected away.
"""

from typing import Protocol

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from .key_source import StagedKeys
from .on_chip import Columns, sbuf


def feature_parts(d: int) -> list[tuple[int, int]]:
    """(first feature, features) of each operand: at most 128 features lie on the partitions."""
    return [(first, min(PARTITIONS, d - first)) for first in range(0, d, PARTITIONS)]


def queue_of(index: int) -> tuple[nisa.dge_mode, nisa.engine]:
    """Who issues the DMA of a block: many small ones are bound by the issue rate of a queue.

    ACT issues one beside its other work, but would wait for a tile that is not free yet.
    """
    if index % 4 == 0:
        return nisa.dge_mode.hwdge, nisa.engine.sync
    if index % 4 == 1:
        return nisa.dge_mode.hwdge, nisa.engine.scalar
    return nisa.dge_mode.unknown, nisa.engine.unknown


class Place(Protocol):
    """Where a segment is in its context: paged_segments.Walk."""

    counts: nl.NkiTensor
    skipped: nl.NkiTensor | None


class StagedColumns:
    """Whole blocks of one KV head, [features, tokens] per 128 features in token order."""

    def __init__(self, k_cache: nl.NkiTensor, kv_head: int, num_blocks: int) -> None:
        _, _, d, self.block_size = k_cache.shape
        self._k_cache, self._kv_head = k_cache, kv_head
        self._parts = feature_parts(d)
        width = num_blocks * self.block_size
        self.columns = [sbuf((height, width), k_cache.dtype) for _, height in self._parts]
        self.blocks = sbuf((1, num_blocks), nl.int32)

    def gather(self, first: int, end: int) -> None:
        """One DMA per block and 128 features."""
        size, d = self.block_size, self._k_cache.shape[2]
        for stage, (feature, height) in zip(self.columns, self._parts, strict=True):
            for block in range(first, end):
                mode, engine = queue_of(block)
                nisa.dma_copy(
                    dst=stage[:, block * size : (block + 1) * size],
                    src=self._k_cache.ap(
                        [[size, height], [1, size]],
                        offset=(self._kv_head * d + feature) * size,
                        scalar_offset=self.blocks[:, block : block + 1], indirect_dim=0,
                    ),
                    dge_mode=mode, engine=engine,
                )  # fmt: skip

    def hold_in_range(self) -> None:
        """Block 0 in the place of absent ones."""
        nisa.tensor_scalar(dst=self.blocks, data=self.blocks, op0=nl.maximum, operand0=0.0)


class KeyColumns(StagedKeys):
    """Columns of a segment; column p of kv_tile j is token p * (segment / 128) + j."""

    def __init__(self, staged: StagedColumns, walk: Place) -> None:
        self.staged = staged
        self._walk = walk
        shape = (PARTITIONS, staged.columns[0].shape[1])
        self._existing = sbuf(shape, nl.uint8)
        self._positions = sbuf(shape)
        self._blocks = sbuf((PARTITIONS, staged.blocks.shape[1]), nl.int32)
        nisa.iota(self._positions, [[1, shape[1]]], offset=0, channel_multiplier=0)

    def begin(self) -> None:
        """Absent keys become zero."""

    def read_table(self, table: nl.NkiTensor, first_block: nl.NkiTensor) -> None:
        """Read the blocks of the segment that begins at a logical block [1, 1] int32."""
        num = self.staged.blocks.shape[1]
        for blocks, stride in ((self.staged.blocks, num), (self._blocks, 0)):
            nisa.dma_copy(
                dst=blocks,
                src=table.ap(
                    [[stride, blocks.shape[0]], [1, num]], offset=0, scalar_offset=first_block,
                    indirect_dim=1,
                ),
            )  # fmt: skip
        self.staged.hold_in_range()

    def mark(self) -> None:
        """Which tokens are there, in token order on every partition."""
        walk, size = self._walk, self.staged.block_size
        num, tokens = self._blocks.shape[1], self._positions.shape[1]
        nisa.tensor_scalar(
            dst=self._existing, data=self._positions, op0=nl.less, operand0=walk.counts
        )
        if walk.skipped is not None:
            nisa.scalar_tensor_tensor(
                dst=self._existing, data=self._positions, op0=nl.greater_equal,
                operand0=walk.skipped, op1=nl.multiply, operand1=self._existing,
            )  # fmt: skip
        by_block = self._existing.ap([[tokens, PARTITIONS], [size, num], [1, size]])
        nisa.scalar_tensor_tensor(
            dst=by_block, data=self._blocks.ap([[num, PARTITIONS], [1, num], [0, size]]),
            op0=nl.greater_equal, operand0=0.0, op1=nl.multiply, operand1=by_block,
        )  # fmt: skip

    def prepare(self, first: int, count: int) -> bool:
        """Absent keys are replaced on the way into columns."""
        return False

    def write_columns(self, first: int, count: int, columns: Columns) -> None:
        """Copy the columns of some kv_tiles, zero where no token exists."""
        for stage, part in zip(self.staged.columns, columns, strict=True):
            source = in_tile_order(stage, stage.shape[0], first, count)
            exists = in_tile_order(self._existing, stage.shape[0], first, count)
            nisa.select_reduce(dst=part, predicate=exists, on_true=source, on_false=0.0)


def in_tile_order(tokens: nl.NkiTensor, height: int, first: int, count: int) -> nl.NkiTensor:
    """Columns [p, segment] in token order as those of kv_tiles, [height, count, 128]."""
    segment = tokens.shape[1]
    return tokens.ap(
        [[segment, height], [1, count], [segment // PARTITIONS, PARTITIONS]], offset=first
    )
