"""What a modelled schedule needs of its core: SBUF, PSUM banks, device loops, program length.

Memory is that of the fullest moment of the timeline; a tile is there from the start of the first
instruction that uses it to the end of the last.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from ..records import Instruction
from ..regions import PSUM_BANK_BYTES
from .result import CostResult
from .tiles import Key, Tile, tiles_of


@dataclass(frozen=True)
class Needs:
    """Of the core that needs most of each."""

    sbuf_bytes: int
    """Per partition."""
    psum_banks: int
    num_loops: int
    """Device loops of the program; what a loop without a trip holds is not in a trace."""
    num_instructions: int
    """After unrolling: bodies of device loops count once, as far as they ran."""

    def __str__(self) -> str:
        return (
            f"{self.sbuf_bytes / 1024:.0f} KiB of SBUF per partition, {self.psum_banks} PSUM "
            f"banks, {self.num_loops} device loops, {self.num_instructions} instructions"
        )


Span = tuple[float, float, int]
"""(begin, end, bytes or bank)."""


def _events(spans: Iterable[Span]) -> list[tuple[float, int, int]]:
    """(time, 1 or -1, bytes or bank), what ends before what begins at the same time."""
    return sorted(e for begin, end, what in spans for e in ((begin, 1, what), (end, -1, what)))


def _most_bytes(spans: Iterable[Span]) -> int:
    return max(accumulate((sign * nbytes for _, sign, nbytes in _events(spans)), initial=0))


def _most_banks(spans: Iterable[Span]) -> int:
    users, most = Counter[int](), 0
    for _, sign, bank in _events(spans):
        users[bank] += sign
        most = max(most, sum(n > 0 for n in users.values()))
    return most


def needs(result: CostResult) -> Needs:
    """Needs of a modelled launch."""
    records = result.launch.records
    tiles = tiles_of(records)
    lives: dict[Key, tuple[float, float]] = {}
    for position, step in result.plan.step_of.items():
        timing, record = result.timings[step], records[position]
        begin, end = timing.start, max(timing.free, timing.done)
        for access in (*record.reads, *record.writes):
            if access.on_chip:
                key = Tile.key(record, access)
                before = lives.get(key, (begin, end))
                lives[key] = min(begin, before[0]), max(end, before[1])
    spans: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for key, tile in tiles.items():
        begin, end = lives[key]
        if tile.access.buffer == "sbuf":
            spans[tile.core, "sbuf"].append((begin, end, tile.nbytes))
        else:
            first = tile.access.offset // PSUM_BANK_BYTES
            last = (tile.access.offset + tile.nbytes - 1) // PSUM_BANK_BYTES
            spans[tile.core, "psum"] += [(begin, end, b) for b in range(first, last + 1)]
    cores = range(result.launch.num_cores)
    loops, instructions = Counter[int](), Counter[int]()
    for record in records:
        if isinstance(record, Instruction):
            instructions[record.core] += not any(record.iteration)
        elif record.edge == "begin":
            loops[record.core] += not any(record.iteration[:-1])
    return Needs(
        max(_most_bytes(spans[core, "sbuf"]) for core in cores),
        max(_most_banks(spans[core, "psum"]) for core in cores),
        max(loops[core] for core in cores),
        max(instructions[core] for core in cores),
    )
