"""A group of slots on chip: scores, weights, weighted values.

Keys lie on partitions: scores are [128 keys, (span, row, run token)], so that one exp serves all
tokens of many slots, weights need no transpose, and P V has the values as stationary operand. Only
K is transposed (keys.py). A slot's keys meet the queries of every span of the slot in one product;
what is not of the span's chain is masked.
"""

from ...backend import nisa, nl
from ...sizes import EDGE_COLUMN, MASKED, MATMUL_COLUMNS, PARTITIONS
from ..loading import element_bytes
from .keys import DecodeKeys
from .stage import DecodeStage
from .sums import SpanSums, SumsShape
from .tensors import MAXIMA_COLUMN, ChainFactors, DecodeBuffers, store_rows

SCALED_COLUMNS = 64
"""Fewest columns that an exp with a scale of its own is worth: as many as it has overhead."""


class DecodeGroup(nl.NKIObject):
    """A group at a time, in stages: the next one's scores run beside the values of this one."""

    def __init__(
        self, stage: DecodeStage, buffers: DecodeBuffers, sums: SumsShape, scale: float
    ) -> None:
        tensors, slots, tokens = stage.tensors, stage.slots, stage.tokens
        spans = stage.spans
        d, dtype = tensors.q.shape[3], tensors.q.dtype
        self.stage = stage
        self.buffers = buffers
        self.slots = slots
        self.spans = spans
        self.slot_spans = spans // slots
        self.edge_tiles = stage.edge_tiles
        self.d = d
        self.rows = tensors.rows
        self.heads = tensors.heads
        self.columns = spans * tensors.rows
        self.tokens = tokens
        self.num_queries = stage.num_queries
        self.scores = buffers.scores
        self.sums = SpanSums(sums, spans, stage.begins.tile)
        self.keys = DecodeKeys(stage, buffers)
        self.pack = self.keys.pack
        self.bank_spans = spans // buffers.score_banks
        # Slots whose maxima one instruction finds: a quarter of a bank.
        bank_slots = self.bank_spans // self.slot_spans
        self.slots_per_maximum = max(1, bank_slots // 4)
        while bank_slots % self.slots_per_maximum != 0:
            self.slots_per_maximum = self.slots_per_maximum - 1
        self.queries: list[nl.NkiTensor] = []
        for features in self.keys.features:
            shape = (self.pack * features[2], self.pack * self.columns)
            self.queries.append(nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf))
        self.weights = nl.ndarray(
            (PARTITIONS, (tokens + self.edge_tiles) * self.columns), dtype=dtype, buffer=nl.sbuf
        )
        self.maxima = nl.ndarray((PARTITIONS, self.columns), dtype=nl.float32, buffer=nl.sbuf)
        self.maximum = nl.ndarray((self.columns, 1), dtype=nl.float32, buffer=nl.sbuf)
        shape = (PARTITIONS, self.edge_tiles * self.columns)
        self.edge_scores = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.factors = ChainFactors(tensors, buffers, scale, spans)
        self.sink_row: nl.NkiTensor | None = None
        self.parts = sums.parts
        shape = (self.sums.height, self.parts * self.columns)
        self.outputs = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)

    def write_constants(self) -> None:
        """Zeros between the queries of packed tokens, and those of the sums."""
        if self.pack > 1:
            for queries in self.queries:
                nisa.memset(dst=queries, value=0.0)
        self.sums.write_constants()

    def turn_queries(self) -> None:
        """Query columns from the query rows; rows of no real query are zero."""
        d, pack, columns = self.d, self.pack, self.columns
        rows = self.stage.q_rows
        if self.num_queries > 1:
            rows = nl.ndarray((columns, d), dtype=self.buffers.dtype, buffer=nl.sbuf)
            nisa.select_reduce(
                dst=rows, predicate=self.stage.real_queries.tile.ap([[1, columns], [0, d]]),
                on_true=self.stage.q_rows, on_false=0.0,
            )  # fmt: skip
        # Where scores of edge tokens come later.
        bank = self.buffers.small_as(rows.dtype)
        first_column = EDGE_COLUMN * 4 // element_bytes(rows.dtype)
        for part in range(len(self.queries)):
            first, step, width = self.keys.features[part]
            column = first_column + part * PARTITIONS
            turned = bank[0 : pack * width, column : column + columns]
            nisa.nc_transpose(
                dst=turned,
                data=rows.ap([[d, columns], [0, pack], [step, width]], offset=first),
                engine=nisa.engine.tensor,
            )
            queries = self.queries[part]
            for token in range(pack):
                nisa.tensor_copy(
                    dst=queries[
                        token * width : (token + 1) * width, token * columns : (token + 1) * columns
                    ],
                    src=turned[token * width : (token + 1) * width, :],
                )

    def score_bank(self) -> None:
        """Scores of the bank that came to SBUF first of those not scored yet."""
        turned = self.keys.ready[0]
        self.keys.ready.remove(turned)
        assert turned.keys is not None, "keys are scored from SBUF"
        for i in range(turned.count):
            chunk = turned.first + i
            if turned.edges:
                self.score_edges(turned.keys, i, chunk)
            else:
                slot = chunk // self.keys.slot_chunks
                self.score_run(turned.keys, i, slot, chunk % self.keys.slot_chunks)
                if (chunk + 1) % (self.keys.slot_chunks * self.slots_per_maximum) == 0:
                    self.find_maxima(slot + 1 - self.slots_per_maximum)

    def score_run(self, keys: nl.NkiTensor, place: int, slot: int, chunk: int) -> None:
        """Scores [128 keys, (span, row, run token)] of a slot's chunk at `place` in `keys`."""
        pack, tokens, spans = self.pack, self.tokens, self.slot_spans
        per_head = self.rows // self.heads
        token = chunk // self.keys.parts * pack
        row = token // tokens * per_head
        for part in self.keys.query_parts(chunk):
            queries = self.queries[part]
            nisa.nc_matmul(
                dst=self.scores.ap(
                    [
                        [self.scores.shape[1], PARTITIONS], [1, pack],
                        [self.rows * tokens, spans], [tokens, per_head],
                    ],
                    offset=self.place(slot * spans) + row * tokens + token % tokens,
                ),
                stationary=self.keys.stationary(keys, place, queries.shape[0], part),
                moving=queries.ap(
                    [
                        [queries.shape[1], queries.shape[0]], [self.columns, pack],
                        [self.rows, spans], [1, per_head],
                    ],
                    offset=slot * spans * self.rows + row,
                ),
                accumulate=part > 0,
            )  # fmt: skip

    def score_edges(self, keys: nl.NkiTensor, place: int, chunk: int) -> None:
        """Scores [128, (span, row)] of a chunk of edge tokens, which lies at `place` of `keys`."""
        heads = self.heads
        per_head = self.rows // heads
        bank = self.buffers.small
        head = chunk // self.keys.parts % heads
        tile = chunk // self.keys.parts // heads
        for part in self.keys.query_parts(chunk):
            width = self.keys.features[part][2]
            queries = self.queries[part]
            nisa.nc_matmul(
                dst=bank.ap(
                    [[bank.shape[1], PARTITIONS], [self.rows, self.spans], [1, per_head]],
                    offset=EDGE_COLUMN + tile * self.columns + head * per_head,
                ),
                stationary=self.keys.stationary(keys, place, width, part),
                moving=queries.ap(
                    [[queries.shape[1], width], [self.rows, self.spans], [1, per_head]],
                    offset=head * per_head,
                ),
                accumulate=part > 0,
            )

    def place(self, span: int) -> int:
        """Column where the scores of a span begin."""
        bank = span // self.bank_spans
        return bank * MATMUL_COLUMNS + span % self.bank_spans * self.rows * self.tokens

    def find_maxima(self, slot: int) -> None:
        """Mask absent runs of the slots of one maximum; the maxima of their rows per partition.

        PE adds MASKED to all columns of an absent partition: a product of one contraction row.
        """
        width = self.rows * self.tokens
        first, count = slot * self.slot_spans, self.slots_per_maximum * self.slot_spans
        for each in range(first, first + count):
            place = self.place(each)
            nisa.nc_matmul(
                dst=self.scores[:, place : place + width],
                stationary=self.stage.absent[:, each * PARTITIONS : (each + 1) * PARTITIONS],
                moving=self.buffers.mask_ones[:, 0:width],
                accumulate=True,
            )
        nisa.tensor_reduce(
            dst=self.maxima[:, first * self.rows : (first + count) * self.rows], op=nl.maximum,
            data=self.scores.ap(
                [
                    [self.scores.shape[1], PARTITIONS], [self.tokens, count * self.rows],
                    [1, self.tokens],
                ],
                offset=self.place(first),
            ),
            axis=2,
        )  # fmt: skip

    def mask_edges(self) -> None:
        """Edge tokens' scores, MASKED where a row does not see one; they join the maxima."""
        columns, queries = self.columns, self.num_queries
        seen = self.stage.edge_seen.tile
        nisa.select_reduce(
            dst=self.edge_scores,
            predicate=seen.ap(
                [
                    [seen.shape[1], PARTITIONS], [queries, self.edge_tiles * self.spans],
                    [0, self.rows // queries], [1, queries],
                ]
            ),
            on_true=self.buffers.small[:, EDGE_COLUMN : EDGE_COLUMN + self.edge_tiles * columns],
            on_false=MASKED,
        )  # fmt: skip
        for tile in range(self.edge_tiles):
            nisa.tensor_tensor(
                dst=self.maxima, data1=self.maxima,
                data2=self.edge_scores[:, tile * columns : (tile + 1) * columns], op=nl.maximum,
            )  # fmt: skip

    def find_maximum(self) -> None:
        """Maximum of each row of each span over the partitions."""
        turned = self.buffers.sums[0 : self.columns, MAXIMA_COLUMN : MAXIMA_COLUMN + PARTITIONS]
        nisa.nc_transpose(dst=turned, data=self.maxima, engine=nisa.engine.tensor)
        nisa.tensor_reduce(dst=self.maximum, op=nl.maximum, data=turned, axis=1, keepdims=True)

    def find_shifts(self) -> None:
        """Running shifts from the maxima."""
        sinks = self.factors.sinks
        if sinks is not None:
            nisa.tensor_tensor(dst=self.maximum, data1=self.maximum, data2=sinks, op=nl.maximum)
        self.sink_row = self.factors.spread_sinks(self.sums.height)
        self.sums.begin(self.sums, self.buffers.spread(self.maximum))

    def weigh(self) -> None:
        """Weights exp(scale * (score - shift)): [128 keys, (run token or edge tile, span, row)]."""
        tokens, columns, sums, edges = self.tokens, self.columns, self.sums, self.edge_scores
        keys = self.factors.keys
        nisa.tensor_tensor(
            dst=edges,
            data1=edges,
            data2=sums.shift.ap(
                [
                    [sums.width, PARTITIONS], [0, self.edge_tiles], [1, self.spans],
                    [sums.pitch, self.rows],
                ],
                offset=1,
            ),
            op=nl.subtract,
        )  # fmt: skip
        each_tile = None
        if keys is not None:
            each_tile = keys.ap([[columns, PARTITIONS], [0, self.edge_tiles], [1, columns]])
        self.factors.exponentials(self.weights[:, tokens * columns :], edges, each_tile)
        # In two halves, so that exp of the first one begins early.
        count = (self.bank_spans + 1) // 2
        while self.bank_spans % count != 0:
            count = count + 1
        for span in range(0, self.spans, count):
            self.weigh_scores(span, count)
        sums.correct(self.factors)

    def weigh_scores(self, span: int, count: int) -> None:
        """Weights of the runs of `count` spans in one bank."""
        tokens, columns, sums = self.tokens, self.columns, self.sums
        keys = self.factors.keys
        width = count * self.rows
        place = self.place(span)
        lowered = nl.ndarray((PARTITIONS, width * tokens), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=lowered,
            data1=self.scores[:, place : place + width * tokens],
            data2=sums.shift.ap(
                [[sums.width, PARTITIONS], [1, count], [sums.pitch, self.rows], [0, tokens]],
                offset=span + 1,
            ),
            op=nl.subtract,
        )
        first = span * self.rows
        per_head = self.rows // self.heads
        if keys is not None and per_head * tokens >= SCALED_COLUMNS:
            # ACT scales by a column: one exp for each head of each span, which share a k_scale.
            for row in range(first, first + width, per_head):
                begin = (row - first) * tokens
                nisa.activation(
                    dst=self.weights.ap(
                        [[self.weights.shape[1], PARTITIONS], [1, per_head], [columns, tokens]],
                        offset=row,
                    ),
                    op=nl.exp,
                    data=lowered[:, begin : begin + per_head * tokens],
                    scale=keys[:, row : row + 1],
                )
            return
        each_token = None
        if keys is not None:
            each_token = keys.ap([[columns, PARTITIONS], [1, width], [0, tokens]], offset=first)
        self.factors.exponentials(
            self.weights.ap(
                [[self.weights.shape[1], PARTITIONS], [1, width], [columns, tokens]], offset=first
            ),
            lowered,
            each_token,
        )

    def sum_weights(self) -> None:
        """Row sums of the weights, on every partition."""
        columns, parts = self.columns, self.parts
        height = self.sums.height
        first = parts * columns
        tiles = self.tokens + self.edge_tiles
        for tile in range(tiles):
            nisa.nc_matmul(
                dst=self.buffers.sums[0:height, first : first + columns],
                stationary=self.buffers.weight_ones,
                moving=self.weights[:, tile * columns : (tile + 1) * columns],
                accumulate=tile > 0,
            )

    def weigh_edges(self) -> None:
        """Values of the edge tokens times their weights; begins the sums of all spans."""
        columns, heads, d = self.columns, self.heads, self.d
        per_head = self.rows // heads
        bank = self.buffers.sums
        values = self.stage.v_stage[self.slots]
        for tile in range(self.edge_tiles):
            weights = (self.tokens + tile) * columns
            for head in range(heads):
                for part in range(self.parts):
                    width = min(PARTITIONS, d - part * PARTITIONS)
                    value = (tile * heads + head) * d + part * PARTITIONS
                    nisa.nc_matmul(
                        dst=bank.ap(
                            [[MATMUL_COLUMNS, width], [self.rows, self.spans], [1, per_head]],
                            offset=part * columns + head * per_head,
                        ),
                        stationary=values[:, value : value + width],
                        moving=self.weights.ap(
                            [
                                [self.weights.shape[1], PARTITIONS], [self.rows, self.spans],
                                [1, per_head],
                            ],
                            offset=weights + head * per_head,
                        ),
                        accumulate=tile > 0,
                    )  # fmt: skip

    def weigh_slot(self, slot: int) -> None:
        """Add a slot's values times their weights to the sums of its spans."""
        columns, d, tokens, spans = self.columns, self.d, self.tokens, self.slot_spans
        per_head = self.rows // self.heads
        bank, weights = self.buffers.sums, self.weights
        values = self.stage.v_stage[slot]
        for head in range(self.heads):
            first = slot * spans * self.rows + head * per_head
            for token in range(tokens):
                for part in range(self.parts):
                    width = min(PARTITIONS, d - part * PARTITIONS)
                    value = (head * tokens + token) * d + part * PARTITIONS
                    nisa.nc_matmul(
                        dst=bank.ap(
                            [[MATMUL_COLUMNS, width], [self.rows, spans], [1, per_head]],
                            offset=part * columns + first,
                        ),
                        stationary=values[:, value : value + width],
                        moving=weights.ap(
                            [[weights.shape[1], PARTITIONS], [self.rows, spans], [1, per_head]],
                            offset=token * columns + first,
                        ),
                        accumulate=True,
                    )

    def add(self) -> None:
        """Continue the running sums."""
        width = (self.parts + 1) * self.columns
        self.sums.add(self.sums, self.buffers.sums[0 : self.sums.height, 0:width])

    def normalise(self) -> None:
        """Outputs behind each span from the sums."""
        self.sums.normalise(self.sink_row, self.factors, self.outputs)

    def store(self, out: nl.NkiTensor) -> None:
        """Store the chains that end in this group."""
        store_rows(
            self.outputs, self.buffers, self.factors.values, self.stage.real_rows.tile,
            self.stage.out_rows.tile, out,
        )  # fmt: skip
