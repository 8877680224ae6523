"""Work tiles of a batch: scores of one beside the values of the one before, edges first.

    DMA   edges K0 V0 | K1 V1    | K2 V2    | ...      | out
    PE    K0'S0 edges | K1'S1 PV0| K2'S2 PV1| ... PVn  |
    DVE         edges | max0     | max1 o0  | ...   on |
    ACT         edges |   exp0   |   exp1   | ...      |

K' is the transpose of keys, S the scores, o the update of the running output. Every segment begins
with the state of its edge tokens, so that only the last tile's values wait for the last load.
Lists and loads of a batch begin with it: a device loop waits for its loads at the end of a trip.
"""

from collections.abc import Iterator
from itertools import cycle

from ...backend import nisa, nl
from ...sizes import FLOOR, MASKED, PARTITIONS
from ..softmax import sigmoid_of
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
from .stages import Stages

KEY_BUFFERS = 3
"""SBUF tiles of transposed keys: PE fills one while others are stationary operands."""

EDGE_BUFFERS = 2
"""The same for the keys of edges, which come between."""


class Batch:
    """One trip: the work tiles of a batch, and its results."""

    def __init__(
        self, args: DecodeArguments, constants: Constants, stages: Stages, lists: Lists
    ) -> None:
        self.args, self.constants, self.stages, self.lists = args, constants, stages, lists
        self.psum = Psum(args.q.dtype, len(args.feature_parts))
        self.columns = args.segments * args.rows
        self.tile_columns = self.columns // args.tiles
        width = self.psum.transposed[0].shape[1]
        rings = []
        for count in (KEY_BUFFERS, EDGE_BUFFERS):
            shape = (PARTITIONS, width)
            tiles = [nl.ndarray(shape, dtype=args.q.dtype, buffer=nl.sbuf) for _ in range(count)]
            rings.append(cycle(tiles))
        self.key_tiles, self.edge_tiles = rings
        self.chunks_per_tile = width // PARTITIONS
        self.load()
        self.queries = self.query_columns()
        self.factors = self.load_factors()
        self.zeros: nl.NkiTensor | None = None
        if self.sums_scores:
            self.zeros = nl.ndarray(
                (PARTITIONS, max(PARTITIONS, 512)), dtype=args.q.dtype, buffer=nl.sbuf
            )
            nisa.memset(dst=self.zeros, value=0.0)

    @property
    def sums_scores(self) -> bool:
        """Whether a score is the sum of two matmuls.

        PSUM is overwritten with zeros by one matmul then, and all others add: a tensor with
        several accumulation chains loses partial sums.
        """
        return len(self.args.keys.feature_parts) > 1

    def numbers(self, stage: nl.NkiTensor) -> nl.NkiTensor:
        """A staging tile as PE multiplies it: int8 in the dtype of the queries, exactly."""
        if stage.dtype != nl.int8:
            return stage
        numbers = nl.ndarray(stage.shape, dtype=self.args.q.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=numbers, src=stage)
        return numbers

    def load(self) -> None:
        """Load queries, edge runs and the first tiles, in the order in which they are needed."""
        args, stages, lists = self.args, self.stages, self.lists
        e, d = args.edge_tokens, args.d
        for part, rows in enumerate(stages.queries):
            height = rows.shape[0]
            gather_runs(args.query_rows, lists.column(1, part)[0:height, :], rows, d)
        for part, stage in enumerate(stages.edge_keys):
            args.keys.gather(lists.column(0, part), stage, e)
        for tile in range(len(stages.keys)):
            self.gather(tile)
            if tile == 0 and args.v_cache is not None:
                for part, stage in enumerate(stages.edge_values):
                    gather_runs(args.v_cache, lists.column(0, part), stage, e * args.value_dim)

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
                for own, (begin, stride, n) in zip(columns, keys.feature_parts, strict=True):
                    bank = self.psum.next_transposed()
                    nisa.nc_transpose(
                        dst=bank[0 : pack * n, 0:height],
                        data=wide.ap([[pack * d, height], [stride, pack * n]], offset=begin),
                        engine=nisa.engine.tensor,
                    )
                    at = token * self.columns + first * args.rows
                    nisa.tensor_copy(dst=own[:, at : at + height], src=bank[0 : pack * n, 0:height])
        return columns

    def load_factors(self) -> nl.NkiTensor | None:
        """Factor of the products times k_scale of each column, [128, (segment, row)].

        With a cap it is negative, as `sigmoid_of` takes it.
        """
        args = self.args
        if args.k_scales is None:
            return None
        own = -args.numbers.of_products if args.numbers.softcap else args.scale
        factors = nl.ndarray((PARTITIONS, self.columns), dtype=nl.float32, buffer=nl.sbuf)
        for part, (first, count) in enumerate(args.parts):
            height = count * args.rows
            column = numbers_of(args.k_scales, self.lists.column(4, part)[0:height, :])
            nisa.tensor_scalar(dst=column, data=column, op0=nl.multiply, operand0=own)
            spread = self.constants.spread(column, self.psum.maxima[1])
            at = first * args.rows
            nisa.tensor_copy(dst=factors[:, at : at + height], src=spread)
        return factors

    def gather(self, tile: int) -> None:
        """Load keys and values of a tile."""
        args, rows = self.args, self.lists.indices[:, tile : tile + 1]
        stage = tile % len(self.stages.keys)
        args.keys.gather(rows, self.stages.keys[stage], args.tokens)
        if args.v_cache is not None:
            width = args.tokens * args.value_dim
            gather_runs(args.v_cache, rows, self.stages.values[stage], width)

    def scores(
        self,
        stage: nl.NkiTensor,
        tokens: int,
        columns: tuple[int, int],  # first and number of the queries'
        bank: nl.NkiTensor,  # PSUM, result: [128, (column, token)]
        ring: Iterator[nl.NkiTensor],  # for transposed keys
    ) -> Iterator[None]:
        """Scores of a stage against some query columns, a portion for each bank of keys."""
        _, count = columns
        keys = self.args.keys
        if self.zeros is not None:
            nisa.nc_matmul(
                dst=bank[:, 0 : count * tokens], stationary=self.zeros[:, 0:PARTITIONS],
                moving=self.zeros[:, 0 : count * tokens], accumulate=False,
            )  # fmt: skip
        chunks = keys.chunks(stage, tokens)
        waiting: list[tuple[nl.NkiTensor, int, list[nl.NkiTensor]]] = []
        for begin in range(0, len(chunks), self.chunks_per_tile):
            some = chunks[begin : begin + self.chunks_per_tile]
            waiting.append((self.transpose(some, next(ring)), begin, some))
            # PE transposes the next chunks while these are copied.
            if begin > 0:
                self.multiply(*waiting.pop(0), tokens, columns, bank)
            yield
        self.multiply(*waiting.pop(0), tokens, columns, bank)

    def transpose(self, chunks: list[nl.NkiTensor], own: nl.NkiTensor) -> nl.NkiTensor:
        """Chunks [128, n] as [n, 128] side by side in SBUF."""
        bank = self.psum.next_transposed()
        heights = {chunk.shape[1] for chunk in chunks}
        for i, chunk in enumerate(chunks):
            part = slice(i * PARTITIONS, (i + 1) * PARTITIONS)
            transposed = bank[0 : chunk.shape[1], part]
            nisa.nc_transpose(dst=transposed, data=chunk, engine=nisa.engine.tensor)
            if len(heights) > 1:
                nisa.tensor_copy(dst=own[0 : chunk.shape[1], part], src=transposed)
        if len(heights) == 1:
            part = slice(0, len(chunks) * PARTITIONS)
            height = chunks[0].shape[1]
            nisa.tensor_copy(
                dst=own[0:height, part], src=bank[0:height, part], engine=nisa.engine.scalar
            )
        return own

    def multiply(
        self,
        transposed: nl.NkiTensor,  # from transpose
        begin: int,
        chunks: list[nl.NkiTensor],
        tokens: int,
        columns: tuple[int, int],  # first and number of the queries'
        bank: nl.NkiTensor,  # result
    ) -> None:
        """Scores of transposed chunks, of which the first has the number `begin`."""
        first, count = columns
        for i, chunk in enumerate(chunks):
            for each in self.args.keys.operands(transposed, i, begin + i, chunk.shape[1]):
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
                    accumulate=self.sums_scores,
                )  # fmt: skip

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
        factors = None if self.args.numbers.softcap else self.factors_of(first, count, tokens)
        weights = nl.ndarray((PARTITIONS, size), dtype=self.args.q.dtype, buffer=nl.sbuf)
        exponentials(
            weights.ap([[size, PARTITIONS], [1, count], [count, tokens]]), lowered,
            self.args.scale, factors,
        )  # fmt: skip
        return weights

    def factors_of(self, first: int, count: int, tokens: int) -> nl.NkiTensor | None:
        """Factors of the scores of some columns, [128, (column, token)]."""
        if self.factors is None:
            return None
        return self.factors.ap([[self.columns, PARTITIONS], [1, count], [0, tokens]], offset=first)

    def raw_scores(
        self, products: nl.NkiTensor, tokens: int, columns: tuple[int, int]
    ) -> nl.NkiTensor:
        """Products [128, (column, token)] in PSUM, with a cap their sigmoids in SBUF.

        columns: first and number.
        """
        numbers, (first, count) = self.args.numbers, columns
        if not numbers.softcap:
            return products
        size = count * tokens
        own = nl.ndarray((PARTITIONS, size), dtype=nl.float32, buffer=nl.sbuf)
        factors = self.factors_of(first, count, tokens)
        if factors is None:
            sigmoid_of(own, products[:, 0:size], -numbers.of_products)
        else:
            nisa.tensor_tensor(dst=own, data1=products[:, 0:size], data2=factors, op=nl.multiply)
            sigmoid_of(own, own, 1.0)
        return own

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
                at = token * (values.shape[1] // tokens) + first
                nisa.nc_matmul(
                    dst=bank[0:number, 0:count], stationary=values[:, at : at + number],
                    moving=weights[:, token * count : (token + 1) * count], accumulate=token > 0,
                )  # fmt: skip
            results.append(bank[0:number, 0:count])
        total = self.psum.sums[:, 0:count]
        nisa.nc_matmul(dst=total, stationary=self.constants.ones, moving=own, accumulate=False)
        return [total, *results]

    def edges(self, state: State) -> Iterator[None]:
        """Begin the state of every segment with its edge tokens, part by part, in portions."""
        args, e = self.args, self.args.edge_tokens
        for part, (first, count) in enumerate(args.parts):
            columns, at = count * args.rows, first * args.rows
            keys = self.numbers(self.stages.edge_keys[part])
            values = self.numbers(self.stages.edge_values[part])
            if args.keys.pack > 1:
                # A token would meet the NaN of one beside it.
                keys = self.seen_tokens(part, keys)
            yield from self.scores(keys, e, (at, columns), self.psum.edge_scores, self.edge_tiles)
            own = state.of(at, columns)
            row_max = nl.ndarray((PARTITIONS, columns), dtype=nl.float32, buffer=nl.sbuf)
            scores = self.raw_scores(self.psum.edge_scores, e, (at, columns))
            masked = self.seen_scores(part, scores, row_max)
            nisa.tensor_copy(dst=own.row_max, src=row_max, engine=nisa.engine.gpsimd)
            yield
            weights = self.weights(masked, e, row_max, at)
            yield
            found = self.attend(weights, self.seen_tokens(part, values), e)
            for total, new in zip(own.sums(), found, strict=True):
                nisa.tensor_copy(dst=total, src=new)
            yield

    def seen_scores(self, part: int, scores: nl.NkiTensor, row_max: nl.NkiTensor) -> nl.NkiTensor:
        """A part's edge scores, MASKED where not seen; their maxima into [128, columns]."""
        args, lists, e = self.args, self.lists, self.args.edge_tokens
        first, count = args.parts[part]
        columns, parts, queries = count * args.rows, len(args.parts), args.q.shape[2]
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
        nisa.tensor_scalar(dst=row_max, data=spread, op0=nl.maximum, operand0=FLOOR)
        return masked

    def seen_tokens(self, part: int, stage: nl.NkiTensor) -> nl.NkiTensor:
        """Edge tokens [128, (token, d)], zero where no query sees them: NaN may lie there."""
        flags, e = self.lists.flags, self.args.edge_tokens
        d = stage.shape[1] // e
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
        """A tile's weights and weighted values join its segments' states, which hold the edges."""
        args = self.args
        count, rows, t = self.tile_columns, args.rows, args.tokens
        scores = self.raw_scores(scores, t, (tile * count, count))
        maxima = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(
            dst=maxima, op=nl.maximum,
            data=scores.ap([[scores.shape[1], PARTITIONS], [t, count], [1, t]]), axis=2,
        )  # fmt: skip
        nisa.tensor_tensor(dst=maxima, data1=maxima, data2=self.mask(tile), op=nl.minimum)
        yield
        column = self.constants.column_maxima(maxima, self.psum.maxima[0])
        yield
        spread = self.constants.spread(column, self.psum.maxima[1])
        row_max = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=row_max, data1=state.row_max, data2=spread, op=nl.maximum)
        for i, before in enumerate(befores):
            nisa.scalar_tensor_tensor(
                dst=row_max[:, 0:rows], data=before.row_max, op0=nl.minimum,
                operand0=self.link(tile, i), op1=nl.maximum, operand1=row_max[:, 0:rows],
            )  # fmt: skip
        lowered_by = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=lowered_by, data=self.mask(tile), op0=nl.multiply, operand0=-1.0, op1=nl.maximum,
            operand1=row_max,
        )  # fmt: skip
        weights = self.weights(scores, t, lowered_by, tile * count)
        yield
        values = self.numbers(self.stages.values[tile % len(self.stages.values)])
        found = self.attend(weights, values, t)
        self.update(tile, found, row_max, state, befores)
        following = tile + len(self.stages.keys)
        if following < args.tiles:
            self.gather(following)

    def mask(self, tile: int) -> nl.NkiTensor:
        """PRESENT on partitions with a run of the segment, else ABSENT, per column of a tile."""
        masks, n = self.lists.masks, self.args.segments // self.args.tiles
        return masks.ap(
            [[masks.shape[1], PARTITIONS], [1, n], [0, self.args.rows]], offset=tile * n
        )

    def link(self, tile: int, which: int) -> nl.NkiTensor:
        """PRESENT where a tile goes on with the first (last) segment before, else ABSENT."""
        at = self.args.segments + which * self.args.tiles + tile
        return self.lists.masks[:, at : at + 1]

    def ends_of(self, state: State) -> list[State]:
        """The first and the last segment of a tile, if it may have several."""
        rows = self.args.rows
        if self.args.segments == self.args.tiles:
            return [state]
        return [state.of(0, rows), state.last(rows)]

    def update(
        self,
        tile: int,
        found: list[nl.NkiTensor],
        row_max: nl.NkiTensor,  # of the tile, with its edges and what it goes on with
        state: State,
        befores: list[State],
    ) -> None:
        """Sums of a tile and of its edges; its first segment goes on with one before."""
        rows, count = self.args.rows, self.tile_columns
        width = count + len(befores) * rows
        changes = nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=changes[:, 0:count], data1=state.row_max, data2=row_max, op=nl.subtract
        )
        for i, before in enumerate(befores):
            at = count + i * rows
            nisa.scalar_tensor_tensor(
                dst=changes[:, at : at + rows], data=before.row_max, op0=nl.minimum,
                operand0=self.link(tile, i), op1=nl.subtract, operand1=row_max[:, 0:rows],
            )  # fmt: skip
        alphas = nl.ndarray((PARTITIONS, width), dtype=nl.float32, buffer=nl.sbuf)
        self.change_factors(tile, changes, alphas)
        nisa.tensor_copy(dst=state.row_max, src=row_max, engine=nisa.engine.gpsimd)
        for number, (own, new) in enumerate(zip(state.sums(), found, strict=True)):
            height = own.shape[0]
            nisa.tensor_tensor(dst=own, data1=own, data2=alphas[0:height, 0:count], op=nl.multiply)
            nisa.tensor_tensor(dst=own, data1=own, data2=new, op=nl.add)
            for i, before in enumerate(befores):
                at = count + i * rows
                scaled = nl.ndarray((height, rows), dtype=nl.float32, buffer=nl.sbuf)
                nisa.tensor_tensor(
                    dst=scaled, data1=before.sums()[number],
                    data2=alphas[0:height, at : at + rows], op=nl.multiply,
                )  # fmt: skip
                first = own[:, 0:rows]
                nisa.tensor_tensor(dst=first, data1=first, data2=scaled, op=nl.add)

    def change_factors(self, tile: int, changes: nl.NkiTensor, alphas: nl.NkiTensor) -> None:
        """Exp of the scaled changes of a tile's columns, and of its first rows for each before."""
        if self.factors is None or self.args.numbers.softcap:
            exponentials(alphas, changes, self.args.scale, None)
            return
        rows, at = self.args.rows, tile * self.tile_columns
        first, width = 0, self.tile_columns
        while first < changes.shape[1]:
            own = slice(first, first + width)
            factors = self.factors[:, at : at + width]
            exponentials(alphas[:, own], changes[:, own], self.args.scale, factors)
            first, width = first + width, rows

    def run(self, carried: State) -> State:
        """All tiles, after the last tile of the batch before; the state of all columns."""
        args = self.args
        count = self.tile_columns
        state = new_state(args, self.columns)
        states = [state.of(tile * count, count) for tile in range(args.tiles)]
        befores = [self.ends_of(carried), *map(self.ends_of, states)]
        background = self.edges(state)
        for tile in range(args.tiles):
            stage = self.numbers(self.stages.keys[tile % len(self.stages.keys)])
            scores, columns = self.psum.next_scores(), (tile * count, count)
            for _ in self.scores(stage, args.tokens, columns, scores, self.key_tiles):
                next(background, None)
            for _ in background:
                pass
            background = self.softmax(tile, scores, states[tile], befores[tile])
        for _ in background:
            pass
        return state
