"""Where cached keys and values come from: rows, columns, or tokens of a window, in segments.

A `KeySource` knows the geometry that all segments share; a `Stage` is the way of one KV head's
segments from the cache to kv_tiles: a gather into staged rows, then pieces of columns and values.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from ...backend import nisa, nl
from ...sizes import MASKED, PARTITIONS
from ..loading import each_element, values_with_ones
from .first_key import FirstKey
from .kv_tiles import PIECE_TILES, KvTiles
from .on_chip import Columns, sbuf, transpose, transpose_features


class StagedKeys(ABC):
    """Keys of a segment as they come out of the cache."""

    @abstractmethod
    def begin(self) -> None:
        """Write once what takes the place of absent keys."""

    @abstractmethod
    def mark(self) -> None:
        """What else is to be known of absent tokens."""

    @abstractmethod
    def prepare(self, first: int, count: int) -> bool:
        """Rows of some kv_tiles with absent tokens replaced, on DVE; False: nothing to do."""

    @abstractmethod
    def write_columns(self, first: int, count: int, columns: Columns) -> None:
        """Key columns of some kv_tiles."""


@dataclass
class Facts:
    """What is known of the tokens of a staged segment."""

    blocks: nl.NkiTensor
    """[128, runs] int32: block of each run of a partition, or slot of a token; -1 absent."""
    present: nl.NkiTensor
    """[128, kv_tiles] uint8: tokens that exist and are mapped."""


class KeyRows(StagedKeys):
    """Rows [128, (kv_tile, d)]."""

    def __init__(
        self,
        rows: nl.NkiTensor,  # [128, tiles * d] SBUF
        dtype: str,  # of the columns
        facts: Facts,
        first_key: FirstKey | None,  # in place of absent keys
    ) -> None:
        self.rows = rows
        self._facts = facts
        self._first_key = first_key
        self._d = rows.shape[1] // facts.present.shape[1]
        self._real = sbuf(rows.shape, dtype)

    def begin(self) -> None:
        """The chunk's first key everywhere, if it is what absent keys become."""
        if self._first_key is not None:
            self._first_key.fill(self._real)

    def mark(self) -> None:
        """`present` says it all."""

    def prepare(self, first: int, count: int) -> bool:
        """Absent keys become zero, or keep what is there, from begin() on."""
        own = slice(first * self._d, (first + count) * self._d)
        predicate = each_element(self._facts.present, first, count, self._d)
        real, rows = self._real[:, own], self.rows[:, own]
        if self._first_key is not None:
            nisa.tensor_copy_predicated(dst=real, src=rows, predicate=predicate)
        else:
            nisa.select_reduce(dst=real, predicate=predicate, on_true=rows, on_false=0.0)
        return True

    def write_columns(self, first: int, count: int, columns: Columns) -> None:
        """PE transposes the rows."""
        transpose_features(self._real, first, count, columns)


@dataclass
class StageOptions:
    """How a segment is made ready for a softmax."""

    dtype: str
    """Of the chunk's keys and values."""
    first_key: FirstKey | None
    """In place of absent keys; None: zero."""


class Stage(ABC):
    """One KV head's segments, one after the other."""

    keys: StagedKeys

    def __init__(
        self, runs: int, tiles: int, value_dim: int, v_dtype: str, options: StageOptions
    ) -> None:
        self.options = options
        self.value_dim = value_dim
        self.values = sbuf((PARTITIONS, tiles * value_dim), v_dtype)
        blocks = sbuf((PARTITIONS, runs), nl.int32)
        self.facts = Facts(blocks, sbuf((PARTITIONS, tiles), nl.uint8))

    @abstractmethod
    def fetch(self) -> Iterator[None]:
        """Gather the next segment, in portions."""

    @abstractmethod
    def mark(self) -> None:
        """Find out which tokens of the gathered segment are present; go on to the next."""

    def make(self, kv: KvTiles) -> Iterator[int]:
        """Make kv_tiles of the gathered segment, then gather the next one.

        Each portion gives the number of pieces that are ready.
        """
        self.mark()
        yield 0
        if kv.absent is not None:
            self._write_mask(kv.absent)
            yield 0
        sizes = [
            (first, min(PIECE_TILES, kv.count - first)) for first in range(0, kv.count, PIECE_TILES)
        ]
        # Rows are prepared a piece ahead, so that PE does not wait for DVE.
        self.keys.prepare(*sizes[0])
        for i, (first, count) in enumerate(sizes):
            if i + 1 < len(sizes) and self.keys.prepare(*sizes[i + 1]):
                yield i
            self.keys.write_columns(first, count, kv.pieces[i].keys)
            yield i
            rows = self.values[:, first * self.value_dim : (first + count) * self.value_dim]
            values_with_ones(rows, self.facts.present, first, count, kv.pieces[i].values)
            yield i + 1
        for _ in self.fetch():
            yield len(sizes)

    def _write_mask(self, mask: nl.NkiTensor) -> None:
        """MASKED for absent tokens, in the order of the key columns."""
        present = self.facts.present
        tiles = present.shape[1]
        added = sbuf((PARTITIONS, tiles), nl.bfloat16)
        nisa.tensor_scalar(
            dst=added, data=present, op0=nl.subtract, operand0=1.0, op1=nl.multiply,
            operand1=-MASKED,
        )  # fmt: skip
        transpose([added[:, j : j + 1] for j in range(tiles)], mask, nisa.engine.vector)


class KeySource(ABC):
    """Segments of cached tokens, of some length."""

    tiles: int
    """kv_tiles of a segment."""

    @abstractmethod
    def stage(self, kv_head: int, options: StageOptions) -> Stage:
        """New staged rows."""
