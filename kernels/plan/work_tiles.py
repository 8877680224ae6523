"""Packing of the runs of sequences into work tiles (decode_plan.py).

A *segment* is the part of a work tile that belongs to one sequence; a tile has up to
`tile_segments` of them.
Sequences are packed one behind the other, so that only tiles with many short sequences stay partly
empty, and a segment begins where the one before it ends.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...reference.paging import cdiv
from ..sizes import PARTITIONS


class Runs(NamedTuple):
    """Some consecutive runs of a sequence."""

    sequence: int
    first: int
    length: int


class Segment(NamedTuple):
    """Runs of a sequence in a tile, from run `place` of the tile on."""

    tile: int
    number: int
    """Which segment of the tile, from 0."""
    place: int
    runs: Runs


def pack(pieces: Sequence[Runs], tile_segments: int) -> list[Segment]:
    """Spans for these runs in their order; one without runs gets a segment as well."""
    segments: list[Segment] = []
    tile, number, place = -1, tile_segments, 0
    for sequence, first, length in pieces:
        end = first + length
        while True:
            if number == tile_segments or place == PARTITIONS:
                tile, number, place = tile + 1, 0, 0
            taken = min(end - first, PARTITIONS - place)
            segments.append(Segment(tile, number, place, Runs(sequence, first, taken)))
            number, place, first = number + 1, place + taken, first + taken
            if first == end:
                break
    return segments


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
    pieces: Sequence[Runs], tile_segments: int, num_cores: int, may_share: bool
) -> tuple[list[list[Segment]], int]:
    """The segments of each core, half of the tiles each, and the sequence that two share or -1.

    The shared sequence comes last on either core.
    """
    segments = pack(pieces, tile_segments)
    if num_cores == 1:
        return [segments], -1
    if not may_share and segments:
        half = cdiv(segments[-1].tile + 1, 2)
        middle = max(s.runs.sequence for s in segments if s.tile < half)
        first = [runs for runs in pieces if runs.sequence <= middle]
        return [pack(first, tile_segments), pack(pieces[len(first) :], tile_segments)], -1
    end = cdiv(segments[-1].tile + 1, 2) if segments else 0
    first_segments = [segment for segment in segments if segment.tile < end]
    if len(first_segments) == len(segments):
        return [first_segments, []], -1
    cut = segments[len(first_segments)].runs
    second = [runs for runs in pieces if runs.sequence > cut.sequence]
    rest = [
        Runs(cut.sequence, cut.first, runs.length - cut.first)
        for runs in pieces
        if runs.sequence == cut.sequence
    ]
    if cut.first:
        return [first_segments, pack(second + rest, tile_segments)], cut.sequence
    return [first_segments, pack(rest + second, tile_segments)], -1
