"""Staging tiles of a group of slots, and what is loaded for it: rows, chains, queries, flags.

Staging tiles hold slots of the trip under way; each is gathered anew for the next trip as soon as
it has been read for the last time, so DMA is a whole trip ahead.
"""

from .backend import nisa, nl
from .decode_tensors import DecodePlanTensors, DecodeTensors
from .tile_schedule import PARTITIONS


class DecodeStage(nl.NKIObject):
    """Keys and values: of a slot [128, (head, token, d)], of edge tokens [128, (tile, head, d)]."""

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
        self.k_stage: list[nl.NkiTensor] = []
        self.v_stage: list[nl.NkiTensor] = []
        shape = (PARTITIONS, tensors.heads * self.tokens * d)
        for _ in range(slots):
            self.k_stage.append(nl.ndarray(shape, dtype=tensors.k_cache.dtype, buffer=nl.sbuf))
            self.v_stage.append(nl.ndarray(shape, dtype=tensors.v_cache.dtype, buffer=nl.sbuf))
        # Behind the slots: the edge tokens.
        shape = (PARTITIONS, edge_tiles * tensors.heads * d)
        self.k_stage.append(nl.ndarray(shape, dtype=tensors.k_cache.dtype, buffer=nl.sbuf))
        self.v_stage.append(nl.ndarray(shape, dtype=tensors.v_cache.dtype, buffer=nl.sbuf))
        self.q_rows = nl.ndarray((self.columns, d), dtype=tensors.q.dtype, buffer=nl.sbuf)
        indices = slots + edge_tiles
        self.gather_rows = nl.ndarray((PARTITIONS, indices), dtype=nl.int32, buffer=nl.sbuf)
        self.chains = nl.ndarray((1, 2 * slots), dtype=nl.int32, buffer=nl.sbuf)
        self.absent = nl.ndarray((1, slots * PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
        self.edge_seen = nl.ndarray(
            (PARTITIONS, edge_tiles * slots * num_queries), dtype=nl.uint8, buffer=nl.sbuf
        )
        self.out_rows = nl.ndarray((self.columns, 1), dtype=nl.int32, buffer=nl.sbuf)
        self.real_rows = nl.ndarray((self.columns, 1), dtype=nl.uint8, buffer=nl.sbuf)

    def fetch_rows(self, trip: nisa.VirtualRegister | None, later: int) -> None:
        """Read which rows and chains the slots of a trip take."""
        indices = self.slots + self.edge_tiles
        pattern = [[indices, PARTITIONS], [1, indices]]
        plan = self.plan
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
        if slot < self.slots:
            self.gather_slot(self.tensors.k_cache, self.k_stage[slot], slot)
        else:
            self.gather_edges(self.tensors.k_cache, self.k_stage[slot])

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
