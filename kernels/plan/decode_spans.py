"""Packing of the runs of chains into slots (plan.py).

A *span* is the part of a slot that belongs to one chain; a slot has up to `slot_spans` of them.
Chains are packed one behind the other, so that only slots with many short chains stay partly
empty, and a span begins where the one before it ends.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...reference.paging import cdiv
from ..sizes import PARTITIONS


class Runs(NamedTuple):
    """Some consecutive runs of a chain."""

    chain: int
    first: int
    length: int


class Span(NamedTuple):
    """Runs of a chain in a slot, from run `place` of the slot on."""

    slot: int
    number: int
    """Which span of the slot, from 0."""
    place: int
    runs: Runs


def pack(pieces: Sequence[Runs], slot_spans: int) -> list[Span]:
    """Spans for these runs in their order; one without runs gets a span as well."""
    spans: list[Span] = []
    slot, number, place = -1, slot_spans, 0
    for chain, first, length in pieces:
        end = first + length
        while True:
            if number == slot_spans or place == PARTITIONS:
                slot, number, place = slot + 1, 0, 0
            taken = min(end - first, PARTITIONS - place)
            spans.append(Span(slot, number, place, Runs(chain, first, taken)))
            number, place, first = number + 1, place + taken, first + taken
            if first == end:
                break
    return spans


def most_slots(num_chains: int, runs_per_chain: int, slot_spans: int) -> int:
    """Most slots that `pack` makes of chains of at most so many runs.

    No chain takes more than if it began a slot; a slot that is not full has the ends of
    `slot_spans` chains, or is the last one.
    """
    alone = num_chains * max(1, cdiv(runs_per_chain, PARTITIONS))
    together = num_chains * runs_per_chain // PARTITIONS + cdiv(num_chains, slot_spans)
    return min(alone, together)


def pack_cores(
    pieces: Sequence[Runs], slot_spans: int, num_cores: int
) -> tuple[list[list[Span]], int]:
    """The spans of each core, half of the slots each, and the chain that two cores share or -1.

    The shared chain comes last on either core.
    """
    spans = pack(pieces, slot_spans)
    if num_cores == 1:
        return [spans], -1
    end = cdiv(spans[-1].slot + 1, 2) if spans else 0
    first_spans = [span for span in spans if span.slot < end]
    if len(first_spans) == len(spans):
        return [first_spans, []], -1
    cut = spans[len(first_spans)].runs
    second = [runs for runs in pieces if runs.chain > cut.chain]
    rest = [
        Runs(cut.chain, cut.first, runs.length - cut.first)
        for runs in pieces
        if runs.chain == cut.chain
    ]
    if cut.first:
        return [first_spans, pack(second + rest, slot_spans)], cut.chain
    return [first_spans, pack(rest + second, slot_spans)], -1
