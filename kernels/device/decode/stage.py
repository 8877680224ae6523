"""Staging tiles of a group of slots, and what is loaded for it: rows, chains, queries, flags.

The scores of a group run beside the values of the group before, so keys are one group ahead of
values. Each staging tile is gathered anew as soon as it has been read, and each list is read anew
as soon as it has been used, a whole group ahead: DMA never waits for a list.
"""

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..cache.transposed_keys import feature_parts, queue_of
from .tensors import DecodePlanTensors, DecodeTensors, GroupList, group_part


class DecodeStage(nl.NKIObject):
    """Keys and values: of a slot [128, (head, token, d)], of edge tokens [128, (tile, head, d)].

    Keys from a pre-transposed cache per 128 features: [features, (head, block, token)] of a slot,
    [features, (head, run, token)] of edge tokens.
    """

    def __init__(
        self,
        tensors: DecodeTensors,
        plan: DecodePlanTensors,
        slots: int,
        spans: int,  # of all slots
        edge_tiles: int,
    ) -> None:
        _, _, num_queries, d = tensors.q.shape
        self.tensors = tensors
        self.plan = plan
        self.slots = slots
        self.spans = spans
        self.edge_tiles = edge_tiles
        self.tokens = tensors.tokens
        self.rows = tensors.rows
        self.columns = spans * tensors.rows
        self.num_queries = num_queries
        self.k_stage: list[list[nl.NkiTensor]] = []
        self.v_stage: list[nl.NkiTensor] = []
        shape = (PARTITIONS, tensors.heads * self.tokens * d)
        self.key_parts = [(0, d)]
        key_width = shape[1]
        if plan.key_blocks is not None:
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
        # Lists of the keys and queries, one group ahead of those of the values and sums.
        shape = (PARTITIONS, slots + edge_tiles)
        self.key_rows = self.new_list(plan.gather_rows, shape, nl.int32)
        self.value_rows = self.new_list(plan.gather_rows, shape, nl.int32)
        self.key_chains = nl.ndarray((1, 2 * spans), dtype=nl.int32, buffer=nl.sbuf)
        self.chains = nl.ndarray((1, 2 * spans), dtype=nl.int32, buffer=nl.sbuf)
        self.absent = nl.ndarray((1, spans * PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
        shape = (PARTITIONS, edge_tiles * spans * num_queries)
        self.edge_seen = self.new_list(plan.edge_seen, shape, nl.uint8)
        shape = (self.columns, 1)
        self.real_queries = self.new_list(plan.real_rows, shape, nl.uint8)
        self.real_rows = self.new_list(plan.real_rows, shape, nl.uint8)
        self.out_rows = self.new_list(plan.out_rows, shape, nl.int32)
        self.begins = self.new_list(plan.begins, (PARTITIONS, 1 + spans), nl.float32)
        self.key_blocks: GroupList | None = None
        self.present: GroupList | None = None
        if plan.key_blocks is not None and plan.present is not None:
            self.key_blocks = self.new_list(
                plan.key_blocks, (1, plan.key_blocks.shape[1]), nl.int32
            )
            self.present = self.new_list(
                plan.present, (PARTITIONS, plan.present.shape[1]), nl.uint8
            )

    def new_list(self, array: nl.NkiTensor, shape: tuple[int, int], dtype: str) -> GroupList:
        """A list of the plan in a tile of its own; a row of HBM is repeated on every partition."""
        size = 1
        for n in array.shape[1:]:
            size = size * n
        tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
        return GroupList(array, self.plan.first, tile, size < shape[0] * shape[1])

    def fetch_row(
        self,
        tile: nl.NkiTensor,  # [1, n] SBUF, result
        array: nl.NkiTensor,  # [entries, n] HBM, of the plan
        group: nisa.VirtualRegister | None,
        later: int,
    ) -> None:
        """Read a row to where it is used, `later` groups after a group."""
        width = tile.shape[1]
        entry = self.plan.first + later
        nisa.dma_copy(dst=tile, src=group_part(array, [[width, 1], [1, width]], entry, group))

    def fetch_key_chains(self, group: nisa.VirtualRegister | None, later: int) -> None:
        """Read the chains of a group's queries."""
        self.fetch_row(self.key_chains, self.plan.chains, group, later)

    def fetch_chains(self, group: nisa.VirtualRegister | None, later: int) -> None:
        """Read the chains of a group's factors."""
        self.fetch_row(self.chains, self.plan.chains, group, later)

    def fetch_absent(self, group: nisa.VirtualRegister | None, later: int) -> None:
        """Read which partitions have no run of a span."""
        self.fetch_row(self.absent, self.plan.absent, group, later)

    def fetch_first_lists(self) -> None:
        """Read the lists of the first group, those that are needed first before the others."""
        if self.key_blocks is None:
            self.key_rows.fetch_first()
        else:
            self.key_blocks.fetch_first()
        self.fetch_key_chains(None, 0)
        self.value_rows.fetch_first()
        self.fetch_queries()
        self.fetch_absent(None, 0)
        for each in self.score_lists():
            each.fetch_first()
        self.fetch_chains(None, 0)
        self.begins.fetch_first()
        for each in self.result_lists():
            each.fetch_first()

    def score_lists(self) -> list[GroupList]:
        """What the scores of a group are masked with."""
        lists: list[GroupList] = []
        if self.num_queries > 1:
            lists.append(self.real_queries)
        if self.present is not None:
            lists.append(self.present)
        lists.append(self.edge_seen)
        return lists

    def result_lists(self) -> list[GroupList]:
        """Where the results of a group go."""
        lists = [self.out_rows]
        if self.num_queries > 1:
            lists.append(self.real_rows)
        return lists

    def fetch_key_rows(self, group: nisa.VirtualRegister | None, later: int) -> None:
        """Read where the keys of a group are."""
        if self.key_blocks is None:
            self.key_rows.fetch(group, later)
        else:
            self.key_blocks.fetch(group, later)

    def gather_slot(
        self,
        cache: nl.NkiTensor,
        rows: nl.NkiTensor,  # [128, slots + edge_tiles] int32
        stage: nl.NkiTensor,  # result
        slot: int,
    ) -> None:
        """Gather the runs of a slot, all heads of its chains."""
        num_blocks, num_kv_heads, block_size, d = cache.shape
        runs_per_block = block_size // self.tokens
        width = self.tokens * d
        runs = cache.reshape((num_blocks * num_kv_heads * runs_per_block, width))
        nisa.dma_copy(
            dst=stage,
            src=runs.ap(
                [[width, PARTITIONS], [block_size * d, self.tensors.heads], [1, width]],
                offset=0, vector_offset=rows[:, slot : slot + 1], indirect_dim=0,
            ),
            oob_mode=nisa.oob_mode.skip,
        )  # fmt: skip

    def gather_edges(
        self,
        cache: nl.NkiTensor,
        rows: nl.NkiTensor,  # [128, slots + edge_tiles] int32
        stage: nl.NkiTensor,  # result
    ) -> None:
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
                    vector_offset=rows[:, column : column + 1],
                    indirect_dim=0,
                ),
                oob_mode=nisa.oob_mode.skip,
            )

    def take_key_rows(self, first: int, count: int) -> None:
        """Use the rows that were read for the keys of some slots."""
        self.take_rows(self.key_rows, self.key_blocks, first, count)

    def take_value_rows(self, first: int, count: int) -> None:
        """Use the rows that were read for the values of some slots."""
        self.take_rows(self.value_rows, None, first, count)

    def take_rows(self, rows: GroupList, blocks: GroupList | None, first: int, count: int) -> None:
        """Those of slots, or behind the last slot of the edge tokens."""
        end = first + count
        columns, width = 1, rows.tile.shape[1]
        if blocks is not None:
            rows = blocks
            columns = PARTITIONS * self.tokens // self.tensors.v_cache.shape[2]
            width = blocks.tile.shape[1]
        last = end * columns
        if end > self.slots:
            last = width
        rows.take(first * columns, last - first * columns)

    def gather_keys(self, slot: int) -> None:
        """Gather the keys of a slot; behind the last slot those of the edge tokens."""
        cache = self.tensors.k_cache
        if self.key_blocks is not None:
            if slot < self.slots:
                self.gather_key_blocks(self.key_blocks, slot)
            else:
                self.gather_edge_runs(self.key_blocks)
        else:
            self.gather_rows(cache, self.key_rows, self.k_stage[slot][0], slot)

    def gather_values(self, slot: int) -> None:
        """Gather the values of a slot; behind the last slot those of the edge tokens."""
        self.gather_rows(self.tensors.v_cache, self.value_rows, self.v_stage[slot], slot)

    def gather_rows(
        self, cache: nl.NkiTensor, rows: GroupList, stage: nl.NkiTensor, slot: int
    ) -> None:
        """Gather a slot, or the edge tokens."""
        if slot < self.slots:
            self.gather_slot(cache, rows.tile, stage, slot)
        else:
            self.gather_edges(cache, rows.tile, stage)

    def gather_key_blocks(self, blocks: GroupList, slot: int) -> None:
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
                        scalar_offset=blocks.tile[:, place : place + 1],
                        indirect_dim=0,
                    ),
                    oob_mode=nisa.oob_mode.skip, dge_mode=mode, engine=engine,
                )  # fmt: skip

    def gather_edge_runs(self, blocks: GroupList) -> None:
        """Load the columns of the runs of the edge tokens, all heads of their chains."""
        cache, heads, tokens = self.tensors.k_cache, self.tensors.heads, self.tokens
        num_blocks, num_kv_heads, d, block_size = cache.shape
        runs = cache.reshape((num_blocks * num_kv_heads * d * block_size // tokens, tokens))
        in_slots = self.slots * (PARTITIONS * tokens // block_size)
        count = blocks.tile.shape[1] - in_slots
        for i in range(len(self.key_parts)):
            first, height = self.key_parts[i]
            stage = self.k_stage[self.slots][i]
            for run in range(count):
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
                        scalar_offset=blocks.tile[:, place : place + 1],
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

    def fetch_queries(self) -> None:
        """Load the query rows of each span's chain."""
        q = self.tensors.q
        num_requests, num_q_heads, num_queries, d = q.shape
        rows = self.rows
        chains = q.reshape((num_requests * num_q_heads * num_queries // rows, rows * d))
        for span in range(self.spans):
            nisa.dma_copy(
                dst=self.q_rows[span * rows : (span + 1) * rows, :],
                src=chains.ap(
                    [[d, rows], [1, d]], offset=0,
                    scalar_offset=self.key_chains[:, 2 * span : 2 * span + 1], indirect_dim=0,
                ),
            )  # fmt: skip
