"""Staging tiles of a group of slots, and what is loaded for it: rows, chains, queries, flags.

Staging tiles hold slots of the trip under way; each is gathered anew for the next trip as soon as
it has been read for the last time, so DMA is a whole trip ahead.
"""

from ..backend import nisa, nl
from ..cache.transposed_keys import feature_parts, queue_of
from ..tile_schedule import PARTITIONS
from .tensors import DecodePlanTensors, DecodeTensors


class DecodeStage(nl.NKIObject):
    """Keys and values: of a slot [128, (head, token, d)], of edge tokens [128, (tile, head, d)].

    Keys from a pre-transposed cache per 128 features: [features, (head, block, token)] of a slot,
    [features, (head, run, token)] of edge tokens.
    """

    def __init__(
        self,
        tensors: DecodeTensors,
        plan: DecodePlanTensors,
        index: int,
        slots: int,
        edge_tiles: int,
    ) -> None:
        _, _, num_queries, d = tensors.q.shape
        self.tensors = tensors
        self.plan = plan
        self.index = index
        self.slots = slots
        self.edge_tiles = edge_tiles
        self.tokens = tensors.tokens
        self.rows = tensors.rows
        self.columns = slots * tensors.rows
        self.num_queries = num_queries
        self.k_stage: list[list[nl.NkiTensor]] = []
        self.v_stage: list[nl.NkiTensor] = []
        shape = (PARTITIONS, tensors.heads * self.tokens * d)
        self.key_blocks: nl.NkiTensor | None = None
        self.present: nl.NkiTensor | None = None
        self.key_parts = [(0, d)]
        key_width = shape[1]
        index_columns = slots + edge_tiles
        if plan.key_blocks is not None:
            width = plan.key_blocks.shape[2]
            self.key_blocks = nl.ndarray((1, width), dtype=nl.int32, buffer=nl.sbuf)
            width = (slots + edge_tiles) * PARTITIONS
            self.present = nl.ndarray((PARTITIONS, width), dtype=nl.uint8, buffer=nl.sbuf)
            self.key_parts = feature_parts(d)
            key_width = tensors.heads * self.tokens * PARTITIONS
        for _ in range(slots):
            tiles: list[nl.NkiTensor] = []
            for _ in self.key_parts:
                tiles.append(
                    nl.ndarray((PARTITIONS, key_width), dtype=tensors.k_cache.dtype, buffer=nl.sbuf)
                )
            self.k_stage.append(tiles)
            self.v_stage.append(nl.ndarray(shape, dtype=tensors.v_cache.dtype, buffer=nl.sbuf))
        # Behind the slots: the edge tokens.
        shape = (PARTITIONS, edge_tiles * tensors.heads * d)
        edges: list[nl.NkiTensor] = []
        for _ in self.key_parts:
            key_shape = shape
            if plan.key_blocks is not None:
                key_shape = (PARTITIONS, edge_tiles * tensors.heads * PARTITIONS)
            edges.append(nl.ndarray(key_shape, dtype=tensors.k_cache.dtype, buffer=nl.sbuf))
        self.k_stage.append(edges)
        self.v_stage.append(nl.ndarray(shape, dtype=tensors.v_cache.dtype, buffer=nl.sbuf))
        self.q_rows = nl.ndarray((self.columns, d), dtype=tensors.q.dtype, buffer=nl.sbuf)
        self.gather_rows = nl.ndarray((PARTITIONS, index_columns), dtype=nl.int32, buffer=nl.sbuf)
        self.chains = nl.ndarray((1, 2 * slots), dtype=nl.int32, buffer=nl.sbuf)
        self.absent = nl.ndarray((1, slots * PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
        self.edge_seen = nl.ndarray(
            (PARTITIONS, edge_tiles * slots * num_queries), dtype=nl.uint8, buffer=nl.sbuf
        )
        self.out_rows = nl.ndarray((self.columns, 1), dtype=nl.int32, buffer=nl.sbuf)
        self.real_rows = nl.ndarray((self.columns, 1), dtype=nl.uint8, buffer=nl.sbuf)

    def fetch_rows(self, trip: nisa.VirtualRegister | None, later: int) -> None:
        """Read which rows and chains the slots of a trip take."""
        indices = self.gather_rows.shape[1]
        pattern = [[indices, PARTITIONS], [1, indices]]
        plan = self.plan
        if plan.key_blocks is not None and self.key_blocks is not None:
            width = self.key_blocks.shape[1]
            nisa.dma_copy(
                dst=self.key_blocks,
                src=plan.entry(plan.key_blocks, self.index, [[width, 1], [1, width]], trip, later),
            )
        nisa.dma_copy(
            dst=self.gather_rows,
            src=plan.entry(plan.gather_rows, self.index, pattern, trip, later),
        )
        pattern = [[2 * self.slots, 1], [1, 2 * self.slots]]
        nisa.dma_copy(
            dst=self.chains, src=plan.entry(plan.chains, self.index, pattern, trip, later)
        )

    def gather_slot(self, cache: nl.NkiTensor, stage: nl.NkiTensor, slot: int) -> None:
        """Gather the runs of a slot, all heads of its chain."""
        num_blocks, num_kv_heads, block_size, d = cache.shape
        runs_per_block = block_size // self.tokens
        width = self.tokens * d
        runs = cache.reshape((num_blocks * num_kv_heads * runs_per_block, width))
        nisa.dma_copy(
            dst=stage,
            src=runs.ap(
                [[width, PARTITIONS], [block_size * d, self.tensors.heads], [1, width]],
                offset=0, vector_offset=self.gather_rows[:, slot : slot + 1], indirect_dim=0,
            ),
            oob_mode=nisa.oob_mode.skip,
        )  # fmt: skip

    def gather_edges(self, cache: nl.NkiTensor, stage: nl.NkiTensor) -> None:
        """Gather the edge tokens, all heads of their chains."""
        num_blocks, num_kv_heads, block_size, d = cache.shape
        heads = self.tensors.heads
        tokens = cache.reshape((num_blocks * num_kv_heads * block_size, d))
        for tile in range(self.edge_tiles):
            column = self.slots + tile
            nisa.dma_copy(
                dst=stage[:, tile * heads * d : (tile + 1) * heads * d],
                src=tokens.ap(
                    [[d, PARTITIONS], [block_size * d, heads], [1, d]],
                    offset=0,
                    vector_offset=self.gather_rows[:, column : column + 1],
                    indirect_dim=0,
                ),
                oob_mode=nisa.oob_mode.skip,
            )

    def gather_keys(self, slot: int) -> None:
        """Gather the keys of a slot; behind the last slot those of the edge tokens."""
        cache = self.tensors.k_cache
        if slot < self.slots:
            if self.key_blocks is None:
                self.gather_slot(cache, self.k_stage[slot][0], slot)
            else:
                self.gather_key_blocks(self.key_blocks, slot)
        elif self.key_blocks is None:
            self.gather_edges(cache, self.k_stage[slot][0])
        else:
            self.gather_edge_runs(self.key_blocks)

    def gather_key_blocks(self, blocks: nl.NkiTensor, slot: int) -> None:
        """Load the columns of the blocks of a slot, all heads of its chain in one DMA."""
        cache, heads = self.tensors.k_cache, self.tensors.heads
        num_blocks, num_kv_heads, d, block_size = cache.shape
        of_head = cache.reshape((num_blocks * num_kv_heads, d * block_size))
        in_slot = PARTITIONS * self.tokens // block_size
        for i in range(len(self.key_parts)):
            first, height = self.key_parts[i]
            stage = self.k_stage[slot][i]
            for block in range(in_slot):
                place = slot * in_slot + block
                mode, engine = queue_of(block)
                nisa.dma_copy(
                    dst=stage.ap(
                        [
                            [stage.shape[1], height], [self.tokens * PARTITIONS, heads],
                            [1, block_size],
                        ],
                        offset=block * block_size,
                    ),
                    src=of_head.ap(
                        [[block_size, height], [d * block_size, heads], [1, block_size]],
                        offset=first * block_size,
                        scalar_offset=blocks[:, place : place + 1],
                        indirect_dim=0,
                    ),
                    oob_mode=nisa.oob_mode.skip, dge_mode=mode, engine=engine,
                )  # fmt: skip

    def gather_edge_runs(self, blocks: nl.NkiTensor) -> None:
        """Load the columns of the runs of the edge tokens, all heads of their chains."""
        cache, heads, tokens = self.tensors.k_cache, self.tensors.heads, self.tokens
        num_blocks, num_kv_heads, d, block_size = cache.shape
        runs = cache.reshape((num_blocks * num_kv_heads * d * block_size // tokens, tokens))
        in_slots = self.slots * (PARTITIONS * tokens // block_size)
        for i in range(len(self.key_parts)):
            first, height = self.key_parts[i]
            stage = self.k_stage[self.slots][i]
            for run in range(blocks.shape[1] - in_slots):
                place = in_slots + run
                nisa.dma_copy(
                    dst=stage.ap(
                        [
                            [stage.shape[1], height], [self.edge_tiles * PARTITIONS, heads],
                            [1, tokens],
                        ],
                        offset=run * tokens,
                    ),
                    src=runs.ap(
                        [[block_size, height], [d * block_size, heads], [1, tokens]],
                        offset=first * block_size,
                        scalar_offset=blocks[:, place : place + 1],
                        indirect_dim=0,
                    ),
                    oob_mode=nisa.oob_mode.skip,
                )  # fmt: skip

    def edge_columns(self, tile: int, head: int, part: int) -> nl.NkiTensor:
        """Keys of a tile of edge tokens, [features, 128]."""
        first = (head * self.edge_tiles + tile) * PARTITIONS
        stage = self.k_stage[self.slots][part]
        return stage[0 : self.key_parts[part][1], first : first + PARTITIONS]

    def key_columns(self, slot: int, head: int, token: int, count: int, part: int) -> nl.NkiTensor:
        """Keys of some tokens of each run, [features, count, 8 b, 16 a] for partition 8 a + b.

        Runs lie in the stage in their order, of which partition 8 a + b has number 16 b + a.
        """
        stage, tokens = self.k_stage[slot][part], self.tokens
        return stage.ap(
            [
                [stage.shape[1], self.key_parts[part][1]], [1, count], [16 * tokens, 8],
                [tokens, 16],
            ],
            offset=head * tokens * PARTITIONS + token,
        )  # fmt: skip

    def gather_values(self, slot: int) -> None:
        """Gather the values of a slot; behind the last slot those of the edge tokens."""
        if slot < self.slots:
            self.gather_slot(self.tensors.v_cache, self.v_stage[slot], slot)
        else:
            self.gather_edges(self.tensors.v_cache, self.v_stage[slot])

    def fetch_queries(self) -> None:
        """Load the query rows of each slot's chain."""
        q = self.tensors.q
        num_requests, num_q_heads, num_queries, d = q.shape
        rows = self.rows
        chains = q.reshape((num_requests * num_q_heads * num_queries // rows, rows * d))
        for slot in range(self.slots):
            nisa.dma_copy(
                dst=self.q_rows[slot * rows : (slot + 1) * rows, :],
                src=chains.ap(
                    [[d, rows], [1, d]], offset=0,
                    scalar_offset=self.chains[:, 2 * slot : 2 * slot + 1], indirect_dim=0,
                ),
            )  # fmt: skip

    def fetch_flags(
        self,
        begins: nl.NkiTensor,  # [128, slots] fp32, result
        trip: nisa.VirtualRegister | None,
    ) -> None:
        """Masks and flags of a trip."""
        plan, columns = self.plan, self.columns
        width = self.absent.shape[1]
        nisa.dma_copy(
            dst=self.absent,
            src=plan.entry(plan.absent, self.index, [[width, 1], [1, width]], trip, 0),
        )
        if plan.present is not None and self.present is not None:
            width = self.present.shape[1]
            nisa.dma_copy(
                dst=self.present,
                src=plan.entry(plan.present, self.index, [[0, PARTITIONS], [1, width]], trip, 0),
            )
        seen = self.edge_seen.shape[1]
        pattern = [[seen, PARTITIONS], [1, seen]]
        nisa.dma_copy(
            dst=self.edge_seen, src=plan.entry(plan.edge_seen, self.index, pattern, trip, 0)
        )
        pattern = [[0, PARTITIONS], [1, self.slots]]
        nisa.dma_copy(dst=begins, src=plan.entry(plan.begins, self.index, pattern, trip, 0))
        pattern = [[1, columns], [1, 1]]
        nisa.dma_copy(
            dst=self.out_rows, src=plan.entry(plan.out_rows, self.index, pattern, trip, 0)
        )
        if self.num_queries > 1:
            nisa.dma_copy(
                dst=self.real_rows, src=plan.entry(plan.real_rows, self.index, pattern, trip, 0)
            )
