"""Packing of the runs of sequences into work tiles (decode_plan.py).

A *segment* is the part of a work tile that belongs to one sequence; a tile has up to
`tile_segments` of them.
Sequences are packed one behind the other, so that only tiles with many short sequences stay partly
empty, and a segment begins where the one before it ends.
"""

from typing import NamedTuple

import numpy as np

from ...reference.paging import cdiv
from ..arrays import Array
from ..sizes import PARTITIONS


class Runs(NamedTuple):
    """Some consecutive runs of each of some sequences: arrays of one length."""

    sequence: Array
    first: Array
    length: Array

    def where(self, chosen: Array) -> "Runs":
        """Those that a mask names."""
        return Runs(*(each[chosen] for each in self))

    def then(self, other: "Runs") -> "Runs":
        """Both, one behind the other."""
        return Runs(*map(np.append, self, other))


class Segments(NamedTuple):
    """Segments in order: arrays of one length."""

    tile: Array
    number: Array
    """Which segment of the tile, from 0."""
    place: Array
    """Run of the tile that it begins with."""
    sequence: Array
    first: Array
    """Run of the sequence that it begins with."""
    length: Array


def pack(pieces: Runs, tile_segments: int) -> Segments:
    """Segments for these runs in their order; one without runs gets a segment as well."""
    count = len(pieces.length)
    before = np.cumsum(pieces.length) - pieces.length
    tile, number = np.divmod(np.arange(count), tile_segments)
    place = before - before[tile * tile_segments] if count else before
    if ((place < PARTITIONS) & (place + pieces.length <= PARTITIONS)).all():
        # No sequence is cut: every tile has as many as it may.
        return Segments(tile, number, place, *pieces)
    return _pack_one_by_one(pieces, tile_segments)


def _pack_one_by_one(pieces: Runs, tile_segments: int) -> Segments:
    """The same, one segment after the other."""
    segments: list[tuple[int, int, int, int, int, int]] = []
    tile, number, place = -1, tile_segments, 0
    ends = pieces.first + pieces.length
    for sequence, first, end in zip(
        pieces.sequence.tolist(), pieces.first.tolist(), ends.tolist(), strict=True
    ):
        while True:
            if number == tile_segments or place == PARTITIONS:
                tile, number, place = tile + 1, 0, 0
            taken = min(end - first, PARTITIONS - place)
            segments.append((tile, number, place, sequence, first, taken))
            number, place, first = number + 1, place + taken, first + taken
            if first == end:
                break
    return Segments(*np.array(segments).reshape(-1, 6).T)


def most_tiles(num_sequences: int, runs_per_sequence: int, tile_segments: int) -> int:
    """Most tiles that `pack` makes of sequences of at most so many runs.

    No sequence takes more than if it began a tile; a tile that is not full has the ends of
    `tile_segments` sequences, or is the last one.
    """
    if tile_segments * runs_per_sequence <= PARTITIONS:
        # No sequence is cut: every tile but the last has as many as it may.
        return cdiv(num_sequences, tile_segments)
    alone = num_sequences * max(1, cdiv(runs_per_sequence, PARTITIONS))
    together = num_sequences * runs_per_sequence // PARTITIONS + cdiv(num_sequences, tile_segments)
    return min(alone, together)


def pack_cores(
    pieces: Runs, tile_segments: int, num_cores: int, may_split: bool
) -> tuple[list[Segments], int]:
    """The segments of each core, half of the tiles each, and the sequence that two share or -1.

    The shared sequence comes last on either core.
    """
    segments = pack(pieces, tile_segments)
    if num_cores == 1:
        return [segments], -1
    count = len(segments.tile)
    half = cdiv(int(segments.tile[-1]) + 1, 2) if count else 0
    end = int(np.searchsorted(segments.tile, half))
    if not may_split and count:
        of_first = pieces.sequence <= segments.sequence[end - 1]
        return [pack(pieces.where(own), tile_segments) for own in (of_first, ~of_first)], -1
    on_first = Segments(*(each[:end] for each in segments))
    if end == count:
        return [on_first, Segments(*(each[:0] for each in segments))], -1
    cut, first = int(segments.sequence[end]), segments.first[end]
    rest = pieces.where(pieces.sequence == cut)
    rest = Runs(rest.sequence, rest.first + first, rest.length - first)
    behind = pieces.where(pieces.sequence > cut)
    if first:
        return [on_first, pack(behind.then(rest), tile_segments)], cut
    return [on_first, pack(rest.then(behind), tile_segments)], -1
