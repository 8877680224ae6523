"""Where keys come from: rows, columns of a pre-transposed cache, fp8 in pairs.

PE transposes keys in chunks [128 runs, features] to [features, 128 runs], the stationary operands
of the scores. fp8 is transposed bit by bit as 16-bit pairs: of features where keys are rows, of
tokens where they are columns. Either way one byte of a pair is picked by a stride of two.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ...backend import nisa, nl
from ...sizes import PARTITIONS
from ..loading import element_bytes

QUADRANT = 32
"""Partitions that an engine can start at are multiples of this."""


@dataclass
class Operand:
    """Keys of a transposed chunk for one matmul."""

    keys: nl.NkiTensor  # [features, 128]
    features: int  # number of the feature part, as in the query columns
    first: int  # token of each run
    tokens: int  # so many of them side by side on the partitions


class KeySource(Protocol):
    """Keys of runs of a cache."""

    feature_parts: list[tuple[int, int, int]]
    """(first, stride, number) of the features that one matmul contracts."""
    pack: int
    """Tokens whose features share the partitions of a chunk."""

    def gather(self, rows: nl.NkiTensor, stage: nl.NkiTensor, tokens: int) -> None:
        """Load the runs that rows [128, 1] int32 name to a staging tile [128, tokens * d]."""

    def chunks(self, stage: nl.NkiTensor, tokens: int) -> list[nl.NkiTensor]:
        """What is transposed, [128, elements] each."""

    def operands(
        self, keys: nl.NkiTensor, place: int, chunk: int, height: int
    ) -> Iterator[Operand]:
        """A transposed chunk, at `place` of a tile [128, chunks * 128], as operands."""


def gather_runs(cache: nl.NkiTensor, rows: nl.NkiTensor, stage: nl.NkiTensor, width: int) -> None:
    """Rows of `width` elements of a cache; those of index -1 stay as they are."""
    size = 1
    for n in cache.shape:
        size = size * n
    nisa.dma_copy(
        dst=stage,
        src=cache.reshape((size // width, width)).ap(
            [[width, rows.shape[0]], [1, width]], offset=0, vector_offset=rows, indirect_dim=0
        ),
        oob_mode=nisa.oob_mode.skip,
    )


def plain_parts(d: int) -> list[tuple[int, int, int]]:
    """Equal parts (first, stride, number) of at most 128, which lie on the partitions.

    Transposed chunks of one height leave PSUM together.
    """
    count = next(n for n in range(-(-d // PARTITIONS), d + 1) if d % n == 0)
    return [(first, 1, d // count) for first in range(0, d, d // count)]


def transposed_operand(
    keys: nl.NkiTensor, place: int, height: int, parity: int | None, dtype: str
) -> nl.NkiTensor:
    """A chunk [height, 128] of a tile of transposed chunks; one byte of each pair."""
    if parity is None:
        return keys[0:height, place * PARTITIONS : (place + 1) * PARTITIONS]
    return keys.ap(
        [[2 * keys.shape[1], height], [2, PARTITIONS]],
        offset=2 * place * PARTITIONS + parity, dtype=dtype,
    )  # fmt: skip


class KeyRows:
    """Keys of a cache [num_blocks, KV, block_size, d], staged as (token, d)."""

    def __init__(self, cache: nl.NkiTensor, dtype: str, edge_tokens: int) -> None:
        self.cache, self.dtype, self.d = cache, dtype, cache.shape[3]
        self.pairs = cache.dtype not in (dtype, nl.int8)
        self.pack = 1
        if self.pairs:
            self.pair_parts = [(first, n) for first, _, n in plain_parts(self.d // 2)]
            self.feature_parts = [
                (2 * first + parity, 2, n) for first, n in self.pair_parts for parity in range(2)
            ]
        else:
            self.feature_parts = plain_parts(self.d)
            if self.d % QUADRANT == 0 and PARTITIONS % self.d == 0:
                self.pack = min(PARTITIONS // self.d, edge_tokens)

    def gather(self, rows: nl.NkiTensor, stage: nl.NkiTensor, tokens: int) -> None:
        gather_runs(self.cache, rows, stage, tokens * self.d)

    def chunks(self, stage: nl.NkiTensor, tokens: int) -> list[nl.NkiTensor]:
        d = self.d
        if self.pairs:
            half, columns = d // 2, stage.shape[1] // 2
            return [
                stage.ap([[columns, PARTITIONS], [1, n]], offset=j * half + first, dtype=self.dtype)
                for j in range(tokens)
                for first, n in self.pair_parts
            ]
        if self.pack > 1:
            width = self.pack * d
            return [stage[:, i * width : (i + 1) * width] for i in range(tokens // self.pack)]
        return [
            stage[:, j * d + first : j * d + first + number]
            for j in range(tokens)
            for first, _, number in self.feature_parts
        ]

    def operands(
        self, keys: nl.NkiTensor, place: int, chunk: int, height: int
    ) -> Iterator[Operand]:
        if self.pairs:
            token, part = divmod(chunk, len(self.pair_parts))
            for parity in range(2):
                view = transposed_operand(keys, place, height, parity, self.cache.dtype)
                yield Operand(view, 2 * part + parity, token, 1)
            return
        token, part = divmod(chunk, len(self.feature_parts))
        view = transposed_operand(keys, place, height, None, self.dtype)
        yield Operand(view, part, token * self.pack, self.pack)


class KeyColumns:
    """Keys of a pre-transposed cache [num_blocks, KV, d, block_size], staged as (d, token)."""

    def __init__(self, cache: nl.NkiTensor, dtype: str) -> None:
        self.cache, self.dtype = cache, dtype
        self.d, self.block_size = cache.shape[2], cache.shape[3]
        self.pairs = cache.dtype not in (dtype, nl.int8)
        self.feature_parts = plain_parts(self.d)
        self.pack = 1

    def gather(self, rows: nl.NkiTensor, stage: nl.NkiTensor, tokens: int) -> None:
        d, per_block = self.d, self.block_size // tokens
        if per_block == 1:
            gather_runs(self.cache, rows, stage, tokens * d)
            return
        # Row of feature 0: a block has d * per_block rows of `tokens` elements; -1 stays -1.
        sign = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=sign, data=rows, op0=nl.less, operand0=0.0, op1=nl.multiply, operand1=-1.0
        )
        start = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=start, data=rows, op0=nl.bitwise_and, operand0=-per_block)
        place = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=place, data=rows, op0=nl.bitwise_and, operand0=per_block - 1)
        factor = nl.ndarray((PARTITIONS, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.memset(dst=factor, value=d)
        nisa.tensor_tensor(dst=start, data1=start, data2=factor, op=nl.multiply)
        nisa.tensor_tensor(dst=start, data1=start, data2=place, op=nl.add)
        of_feature = nl.ndarray((PARTITIONS, d), dtype=nl.int32, buffer=nl.sbuf)
        nisa.iota(of_feature, [[per_block, d]], offset=0, channel_multiplier=0)
        column = [[1, PARTITIONS], [0, d]]
        nisa.tensor_tensor(dst=of_feature, data1=of_feature, data2=start.ap(column), op=nl.add)
        nisa.tensor_tensor(
            dst=of_feature, data1=of_feature, data2=sign.ap(column), op=nl.bitwise_or
        )
        for f in range(d):
            part = stage[:, f * tokens : (f + 1) * tokens]
            gather_runs(self.cache, of_feature[:, f : f + 1], part, tokens)

    def chunks(self, stage: nl.NkiTensor, tokens: int) -> list[nl.NkiTensor]:
        size = element_bytes(self.dtype) if self.pairs else 1
        strides = tokens // size
        return [
            stage.ap(
                [[self.d * strides, PARTITIONS], [strides, number]], offset=first * strides + j,
                dtype=self.dtype,
            )
            for j in range(strides)
            for first, _, number in self.feature_parts
        ]  # fmt: skip

    def operands(
        self, keys: nl.NkiTensor, place: int, chunk: int, height: int
    ) -> Iterator[Operand]:
        token, part = divmod(chunk, len(self.feature_parts))
        if not self.pairs:
            view = transposed_operand(keys, place, height, None, self.dtype)
            yield Operand(view, part, token, 1)
            return
        for parity in range(2):
            view = transposed_operand(keys, place, height, parity, self.cache.dtype)
            yield Operand(view, part, 2 * token + parity, 1)
