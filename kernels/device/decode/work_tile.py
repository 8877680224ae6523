"""Work tiles of a batch: scores of one beside the values of the one before, edges at the end.

    DMA   K0 V0 | K1 V1    | K2 V2    | ...                          | out
    PE    K0'S0 | K1'S1 PV0| K2'S2 PV1| ... PVn | edges: K'S PV      |
    DVE         | max0     | max1 o0  | ...     | max of edges first |
    ACT         |   exp0   |   exp1   | ...                          |

K' is the transpose of keys, S the scores, o the update of the running output. Lists and loads of a
batch begin with it: a device loop waits for its loads at the end of every trip.
"""

from collections.abc import Iterator

from ...backend import nisa, nl
from ...sizes import FLOOR, MASKED, PARTITIONS
from ..loading import element_bytes
from .batch import (
    Constants,
    DecodeArguments,
    Lists,
    Psum,
    State,
    exponentials,
    new_state,
    numbers_of,
)
from .keys import gather_runs

KEY_BUFFERS = 3
"""SBUF tiles of transposed keys: PE fills one while others are stationary operands."""

ZERO_BYTES = 4096
"""Bytes per partition of the zeros that staging tiles begin with."""

STAGES = 4
"""Staging tiles of keys and of values: so many work tiles are loaded or in use at once."""


class Stages:
    """Staging tiles, which keep their contents over trips: runs of index -1 are not loaded."""

    def __init__(self, args: DecodeArguments, key_dtype: str, num_parts: int) -> None:
        d = args.d
        count = min(STAGES, args.tiles)

        def new(tokens: int, dtype: str) -> nl.NkiTensor:
            return nl.ndarray((PARTITIONS, tokens * d), dtype=dtype, buffer=nl.sbuf)

        self.keys = [new(args.tokens, key_dtype) for _ in range(count)]
        self.values = [new(args.tokens, args.v_cache.dtype) for _ in range(count)]
        self.edge_keys = [new(args.edge_tokens, key_dtype) for _ in range(num_parts)]
        self.edge_values = [new(args.edge_tokens, args.v_cache.dtype) for _ in range(num_parts)]
        self.queries = [
            nl.ndarray((count * args.rows, d), dtype=args.q.dtype, buffer=nl.sbuf)
            for _, count in args.parts
        ]

    def clear(self) -> None:
        """Zeros, so that what no run fills is finite: keys by DVE, values by ACT."""
        for rows in self.queries:
            nisa.memset(dst=rows, value=0.0)
        zeros = nl.ndarray((PARTITIONS, ZERO_BYTES // 4), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=zeros, value=0.0)
        for keys, values in zip(
            self.edge_keys + self.keys, self.edge_values + self.values, strict=True
        ):
            fill(keys, zeros, nl.bfloat16, nisa.engine.vector)
            fill(values, zeros, nl.float32, nisa.engine.scalar)


def fill(tile: nl.NkiTensor, zeros: nl.NkiTensor, dtype: str, engine: nisa.engine) -> None:
    """Copy zeros as elements of a dtype: DVE copies 16-bit ones fastest, ACT words."""
    size = 2 if dtype == nl.bfloat16 else 4
    width = tile.shape[1] * stored_bytes(tile.dtype) // size
    room = ZERO_BYTES // size
    for first in range(0, width, room):
        count = min(room, width - first)
        nisa.tensor_copy(
            dst=tile.ap([[width, PARTITIONS], [1, count]], offset=first, dtype=dtype),
            src=zeros.ap([[room, PARTITIONS], [1, count]], dtype=dtype),
            engine=engine,
        )


def stored_bytes(dtype: str) -> int:
    """Bytes of one element of a cache."""
    return 1 if dtype == nl.float8_e4m3 else element_bytes(dtype)


class Batch:
    """One trip: the work tiles of a batch, and its results."""

    def __init__(
        self, args: DecodeArguments, constants: Constants, stages: Stages, lists: Lists
    ) -> None:
        self.args, self.constants, self.stages, self.lists = args, constants, stages, lists
        self.psum = Psum(args.q.dtype)
        self.columns = args.segments * args.rows
        self.tile_columns = self.columns // args.tiles
        width = self.psum.transposed[0].shape[1]
        self.key_tiles = [
            nl.ndarray((PARTITIONS, width), dtype=args.q.dtype, buffer=nl.sbuf)
            for _ in range(KEY_BUFFERS)
        ]
        self.num_keys = 0
        self.load()
        self.queries = self.query_columns()
        self.factors = self.load_factors()
        self.zeros: nl.NkiTensor | None = None
        if self.has_chains:
            self.zeros = nl.ndarray(
                (PARTITIONS, max(PARTITIONS, 512)), dtype=args.q.dtype, buffer=nl.sbuf
            )
            nisa.memset(dst=self.zeros, value=0.0)

    @property
    def has_chains(self) -> bool:
        """Whether a score is the sum of two matmuls.

        PSUM is overwritten with zeros by one matmul then, and all others add: a tensor with
        several accumulation chains loses partial sums.
        """
        return len(self.args.keys.feature_parts) > 1

    def load(self) -> None:
        """Load queries, edge runs and the first tiles, in the order in which they are needed."""
        args, stages, lists, e, d = (
            self.args, self.stages, self.lists, self.args.edge_tokens, self.args.d,
        )  # fmt: skip
        for part, rows in enumerate(stages.queries):
            height = rows.shape[0]
            gather_runs(args.query_rows, lists.column(1, part)[0:height, :], rows, d)
        for part, stage in enumerate(stages.edge_keys):
            args.keys.gather(lists.column(0, part), stage, e)
        for tile in range(len(stages.keys)):
            self.gather(tile)
            if tile == 0:
                for part, stage in enumerate(stages.edge_values):
                    gather_runs(args.v_cache, lists.column(0, part), stage, e * d)

    def query_columns(self) -> list[nl.NkiTensor]:
        """Query columns of each feature part, [features, (pack, segment, row)].

        With several tokens side by side on the partitions a query stands once per token, zero at
        the features of the others.
        """
        args, keys = self.args, self.args.keys
        d, pack = args.d, keys.pack
        columns: list[nl.NkiTensor] = [
            nl.ndarray((pack * n, pack * self.columns), dtype=args.q.dtype, buffer=nl.sbuf)
            for _, _, n in keys.feature_parts
        ]
        for part, (first, count) in enumerate(args.parts):
            height = count * args.rows
            rows = self.stages.queries[part]
            for token in range(pack):
                wide = rows
                if pack > 1:
                    wide = nl.ndarray((height, pack * d), dtype=args.q.dtype, buffer=nl.sbuf)
                    nisa.memset(dst=wide, value=0.0)
                    nisa.tensor_copy(dst=wide[:, token * d : (token + 1) * d], src=rows)
                for own, (begin, step, n) in zip(columns, keys.feature_parts, strict=True):
                    bank = self.psum.next_transposed()
                    nisa.nc_transpose(
                        dst=bank[0 : pack * n, 0:height],
                        data=wide.ap([[pack * d, height], [step, pack * n]], offset=begin),
                        engine=nisa.engine.tensor,
                    )
                    at = token * self.columns + first * args.rows
                    nisa.tensor_copy(dst=own[:, at : at + height], src=bank[0 : pack * n, 0:height])
        return columns

    def load_factors(self) -> nl.NkiTensor | None:
        """Softmax scale times k_scale of each column, [128, (segment, row)]."""
        args = self.args
        if args.k_scales is None:
            return None
        factors = nl.ndarray((PARTITIONS, self.columns), dtype=nl.float32, buffer=nl.sbuf)
        for part, (first, count) in enumerate(args.parts):
            height = count * args.rows
            column = numbers_of(args.k_scales, self.lists.column(4, part)[0:height, :])
            nisa.tensor_scalar(dst=column, data=column, op0=nl.multiply, operand0=args.scale)
            spread = self.constants.spread(column, self.psum.maxima[1])
            at = first * args.rows
            nisa.tensor_copy(dst=factors[:, at : at + height], src=spread)
        return factors

    def gather(self, tile: int) -> None:
        """Load keys and values of a tile."""
        args, rows = self.args, self.lists.indices[:, tile : tile + 1]
        stage = tile % len(self.stages.keys)
        args.keys.gather(rows, self.stages.keys[stage], args.tokens)
        gather_runs(args.v_cache, rows, self.stages.values[stage], args.tokens * args.d)

    def scores(
        self,
        stage: nl.NkiTensor,
        tokens: int,
        columns: tuple[int, int],  # first and number of the queries'
        background: Iterator[None],  # goes on a step after each bank of keys
    ) -> nl.NkiTensor:
        """Scores [128, (column, token)] of a stage against some query columns."""
        _, count = columns
        keys = self.args.keys
        bank = self.psum.next_scores()
        if self.zeros is not None:
            nisa.nc_matmul(
                dst=bank[:, 0 : count * tokens], stationary=self.zeros[:, 0:PARTITIONS],
                moving=self.zeros[:, 0 : count * tokens], accumulate=False,
            )  # fmt: skip
        chunks = keys.chunks(stage, tokens)
        per_bank = self.key_tiles[0].shape[1] // PARTITIONS
        waiting: list[tuple[nl.NkiTensor, int, list[nl.NkiTensor]]] = []
        for begin in range(0, len(chunks), per_bank):
            some = chunks[begin : begin + per_bank]
            waiting.append((self.transpose(some), begin, some))
            # PE transposes the next chunks while these are copied.
            if begin > 0:
                self.multiply(*waiting.pop(0), tokens, columns, bank)
            next(background, None)
        self.multiply(*waiting.pop(0), tokens, columns, bank)
        return bank

    def transpose(self, chunks: list[nl.NkiTensor]) -> nl.NkiTensor:
        """Chunks [128, n] as [n, 128] side by side in SBUF."""
        bank, own = self.psum.next_transposed(), self.next_keys()
        heights = {chunk.shape[1] for chunk in chunks}
        for i, chunk in enumerate(chunks):
            part = slice(i * PARTITIONS, (i + 1) * PARTITIONS)
            turned = bank[0 : chunk.shape[1], part]
            nisa.nc_transpose(dst=turned, data=chunk, engine=nisa.engine.tensor)
            if len(heights) > 1:
                nisa.tensor_copy(dst=own[0 : chunk.shape[1], part], src=turned)
        if len(heights) == 1:
            part = slice(0, len(chunks) * PARTITIONS)
            height = chunks[0].shape[1]
            nisa.tensor_copy(
                dst=own[0:height, part], src=bank[0:height, part], engine=nisa.engine.scalar
            )
        return own

    def multiply(
        self,
        turned: nl.NkiTensor,  # from transpose
        begin: int,
        chunks: list[nl.NkiTensor],
        tokens: int,
        columns: tuple[int, int],  # first and number of the queries'
        bank: nl.NkiTensor,  # result
    ) -> None:
        """Scores of transposed chunks, of which the first has the number `begin`."""
        first, count = columns
        for i, chunk in enumerate(chunks):
            for each in self.args.keys.operands(turned, i, begin + i, chunk.shape[1]):
                queries = self.queries[each.features]
                nisa.nc_matmul(
                    dst=bank.ap(
                        [[bank.shape[1], PARTITIONS], [1, each.tokens], [tokens, count]],
                        offset=each.first,
                    ),
                    stationary=each.keys,
                    moving=queries.ap(
                        [
                            [queries.shape[1], queries.shape[0]], [self.columns, each.tokens],
                            [1, count],
                        ],
                        offset=first,
                    ),
                    accumulate=self.has_chains,
                )  # fmt: skip

    def next_keys(self) -> nl.NkiTensor:
        """The next SBUF tile of transposed keys."""
        self.num_keys += 1
        return self.key_tiles[self.num_keys % KEY_BUFFERS]

    def weights(
        self,
        scores: nl.NkiTensor,  # [128, columns * tokens or more], (column, token)
        tokens: int,
        lowered_by: nl.NkiTensor,  # [128, columns] fp32
        first: int,  # of the batch's columns
    ) -> nl.NkiTensor:
        """Exp of the scaled scores minus what they are lowered by, [128, (token, column)]."""
        count = lowered_by.shape[1]
        size = count * tokens
        lowered = nl.ndarray((PARTITIONS, size), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=lowered, data1=scores[:, 0:size],
            data2=lowered_by.ap([[count, PARTITIONS], [1, count], [0, tokens]]), op=nl.subtract,
        )  # fmt: skip
        factors = self.factors
        if factors is not None:
            factors = factors.ap(
                [[self.columns, PARTITIONS], [1, count], [0, tokens]], offset=first
            )
        weights = nl.ndarray((PARTITIONS, size), dtype=self.args.q.dtype, buffer=nl.sbuf)
        exponentials(
            weights.ap([[size, PARTITIONS], [1, count], [count, tokens]]), lowered,
            self.args.scale, factors,
        )  # fmt: skip
        return weights

    def attend(
        self, weights: nl.NkiTensor, values: nl.NkiTensor, tokens: int
    ) -> list[nl.NkiTensor]:
        """Sums of weights [128, n] and of weighted values [<= 128, n] per feature part, PSUM."""
        args, count = self.args, weights.shape[1] // tokens
        own = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(
            dst=own, op=nl.add,
            data=weights.ap([[count * tokens, PARTITIONS], [1, count], [count, tokens]]), axis=2,
        )  # fmt: skip
        results: list[nl.NkiTensor] = []
        for part, (first, number) in enumerate(args.feature_parts):
            bank = self.psum.outputs[part]
            for token in range(tokens):
                at = token * args.d + first
                nisa.nc_matmul(
                    dst=bank[0:number, 0:count], stationary=values[:, at : at + number],
                    moving=weights[:, token * count : (token + 1) * count], accumulate=token > 0,
                )  # fmt: skip
            results.append(bank[0:number, 0:count])
        total = self.psum.sums[:, 0:count]
        nisa.nc_matmul(dst=total, stationary=self.constants.ones, moving=own, accumulate=False)
        return [total, *results]

    def edge_scores(self) -> tuple[list[nl.NkiTensor], nl.NkiTensor]:
        """Masked scores of the edge tokens of each part, and their maxima [128, columns]."""
        args, lists, e = self.args, self.lists, self.args.edge_tokens
        kept: list[nl.NkiTensor] = []
        maxima = nl.ndarray((PARTITIONS, self.columns), dtype=nl.float32, buffer=nl.sbuf)
        parts, queries = len(args.parts), args.q.shape[2]
        for part, (first, count) in enumerate(args.parts):
            stage = self.stages.edge_keys[part]
            columns, at = count * args.rows, first * args.rows
            if args.keys.pack > 1:
                # A token would meet the NaN of one beside it.
                stage = self.seen_tokens(part, stage)
            scores = self.scores(stage, e, (at, columns), iter(()))
            masked = nl.ndarray((PARTITIONS, columns * e), dtype=nl.float32, buffer=nl.sbuf)
            nisa.select_reduce(
                dst=masked,
                predicate=lists.flags.ap(
                    [
                        [lists.flags.shape[1], PARTITIONS], [queries * e, count],
                        [0, args.rows // queries], [1, queries * e],
                    ],
                    offset=parts + parts * e + first * queries * e,
                ),
                on_true=scores[:, 0 : columns * e],
                on_false=MASKED,
            )  # fmt: skip
            own = nl.ndarray((PARTITIONS, columns), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_reduce(
                dst=own, op=nl.maximum,
                data=masked.ap([[columns * e, PARTITIONS], [e, columns], [1, e]]), axis=2,
            )  # fmt: skip
            column = self.constants.column_maxima(own, self.psum.maxima[0])
            spread = self.constants.spread(column, self.psum.maxima[1])
            nisa.tensor_scalar(
                dst=maxima[:, at : at + columns], data=spread, op0=nl.maximum, operand0=FLOOR
            )
            kept.append(masked)
        return kept, maxima

    def seen_tokens(self, part: int, stage: nl.NkiTensor) -> nl.NkiTensor:
        """Edge tokens [128, (token, d)], zero where no query sees them: NaN may lie there."""
        flags, e, d = self.lists.flags, self.args.edge_tokens, self.args.d
        kept = nl.ndarray(stage.shape, dtype=stage.dtype, buffer=nl.sbuf)
        nisa.select_reduce(
            dst=kept,
            predicate=flags.ap(
                [[flags.shape[1], PARTITIONS], [1, e], [0, d]],
                offset=len(self.args.parts) + part * e,
            ),
            on_true=stage, on_false=0.0,
        )  # fmt: skip
        return kept

    def softmax(
        self, tile: int, scores: nl.NkiTensor, state: State, befores: list[State]
    ) -> Iterator[None]:
        """A tile's weights and weighted values; `state` begins with the maxima of its edges."""
        args = self.args
        count, rows, t = self.tile_columns, args.rows, args.tokens
        maxima = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(
            dst=maxima, op=nl.maximum,
            data=scores.ap([[scores.shape[1], PARTITIONS], [t, count], [1, t]]), axis=2,
        )  # fmt: skip
        nisa.tensor_tensor(dst=maxima, data1=maxima, data2=self.mask(tile), op=nl.add)
        yield
        column = self.constants.column_maxima(maxima, self.psum.maxima[0])
        yield
        spread = self.constants.spread(column, self.psum.maxima[1])
        nisa.tensor_tensor(dst=state.row_max, data1=state.row_max, data2=spread, op=nl.maximum)
        for i, before in enumerate(befores):
            nisa.scalar_tensor_tensor(
                dst=state.row_max[:, 0:rows], data=before.row_max, op0=nl.add,
                operand0=self.link(tile, i), op1=nl.maximum, operand1=state.row_max[:, 0:rows],
            )  # fmt: skip
        lowered_by = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=lowered_by, data1=state.row_max, data2=self.mask(tile), op=nl.subtract
        )
        weights = self.weights(scores, t, lowered_by, tile * count)
        yield
        stage = tile % len(self.stages.values)
        found = self.attend(weights, self.stages.values[stage], t)
        self.update(tile, found, state, befores)
        following = tile + len(self.stages.keys)
        if following < args.tiles:
            self.gather(following)

    def mask(self, tile: int) -> nl.NkiTensor:
        """0, or MASKED on partitions without a run of the segment, for each column of a tile."""
        masks, n = self.lists.masks, self.args.segments // self.args.tiles
        return masks.ap(
            [[masks.shape[1], PARTITIONS], [1, n], [0, self.args.rows]], offset=tile * n
        )

    def link(self, tile: int, which: int) -> nl.NkiTensor:
        """0 where a tile goes on with the first (last) segment before, else MASKED, [128, 1]."""
        at = self.args.segments + which * self.args.tiles + tile
        return self.lists.masks[:, at : at + 1]

    def ends_of(self, state: State) -> list[State]:
        """The first and the last segment of a tile, if it may have several."""
        rows = self.args.rows
        if self.args.segments == self.args.tiles:
            return [state]
        return [state.of(0, rows), state.last(rows)]

    def update(
        self, tile: int, found: list[nl.NkiTensor], state: State, befores: list[State]
    ) -> None:
        """Row sums and outputs of a tile; its first segment goes on with one before."""
        rows = self.args.rows
        factors = self.factors
        if factors is not None:
            at = tile * self.tile_columns
            factors = factors[:, at : at + rows]
        alphas = []
        for i, before in enumerate(befores):
            change = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
            nisa.scalar_tensor_tensor(
                dst=change, data=before.row_max, op0=nl.add, operand0=self.link(tile, i),
                op1=nl.subtract, operand1=state.row_max[:, 0:rows],
            )  # fmt: skip
            alpha = nl.ndarray((PARTITIONS, rows), dtype=nl.float32, buffer=nl.sbuf)
            exponentials(alpha, change, self.args.scale, factors)
            alphas.append(alpha)
        for number, (own, new) in enumerate(zip(state.sums(), found, strict=True)):
            height, total = own.shape[0], new[:, 0:rows]
            for before, alpha in zip(befores, alphas, strict=True):
                scaled = nl.ndarray((height, rows), dtype=nl.float32, buffer=nl.sbuf)
                nisa.tensor_tensor(
                    dst=scaled, data1=before.sums()[number], data2=alpha[0:height, :],
                    op=nl.multiply,
                )  # fmt: skip
                nisa.tensor_tensor(dst=own[:, 0:rows], data1=scaled, data2=total, op=nl.add)
                total = own[:, 0:rows]
            if own.shape[1] > rows:
                nisa.tensor_copy(dst=own[:, rows:], src=new[:, rows:])

    def run(self, carried: State) -> State:
        """All tiles, after the last tile of the batch before; the state of all columns."""
        args = self.args
        count = self.tile_columns
        edge_scores, edge_maxima = self.edge_scores()
        edge_values = [self.seen_tokens(i, v) for i, v in enumerate(self.stages.edge_values)]
        state = new_state(args, self.columns)
        state.row_max = edge_maxima
        states = [state.of(tile * count, count) for tile in range(args.tiles)]
        befores = [self.ends_of(carried), *map(self.ends_of, states)]
        background: Iterator[None] = iter(())
        for tile in range(args.tiles):
            stage = self.stages.keys[tile % len(self.stages.keys)]
            scores = self.scores(stage, args.tokens, (tile * count, count), background)
            for _ in background:
                pass
            background = self.softmax(tile, scores, states[tile], befores[tile])
        for _ in background:
            pass
        self.add_edges(edge_scores, edge_values, state)
        return state

    def add_edges(
        self, edge_scores: list[nl.NkiTensor], edge_values: list[nl.NkiTensor], state: State
    ) -> None:
        """Add the edge tokens to the sums of all segments."""
        args, e = self.args, self.args.edge_tokens
        for part, (first, count) in enumerate(args.parts):
            columns, at = count * args.rows, first * args.rows
            row_max = nl.ndarray((PARTITIONS, columns), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=row_max, src=state.row_max[:, at : at + columns])
            weights = self.weights(edge_scores[part], e, row_max, at)
            found = self.attend(weights, edge_values[part], e)
            for own, new in zip(state.sums(), found, strict=True):
                nisa.tensor_tensor(
                    dst=own[:, at : at + columns], data1=own[:, at : at + columns], data2=new,
                    op=nl.add,
                )  # fmt: skip
