"""SBUF bytes and instructions of the kernels over supported shapes.

Shapes are drawn at random from all that the documentation allows (`shapes.py`) and outlined
without data (`outline.py`), fallbacks included. A call that the host function refuses with a
ValueError counts as refused; a program that needs more than there is fails the command.
"""

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from segattn.benchmarks.kernels.modelled import public_functions
from segattn.benchmarks.kernels.outline import outline_call
from segattn.benchmarks.kernels.shapes import DRAW, Call
from segattn.reference.nki.errors import CapacityError
from segattn.reference.nki.regions import SBUF_USABLE_BYTES
from segattn.reference.outputs import OutputFile
from segattn.reference.terminal import Advance, columns, phase, table


def instruction_limit() -> int:
    """Most instructions of a program: neuronx-cc refuses longer ones."""
    return 5_000_000


LONG_PROGRAM = 60_000
"""Longer programs are counted: 31,012 instructions a core are known to compile, 350,000 in a graph
were refused."""


@dataclass(frozen=True)
class Footprint:
    """What one call's program needs."""

    kernel: str
    label: str
    sbuf_bytes: int = 0
    num_instructions: int = 0
    refused: str = ""
    """The host function's ValueError, which names the argument."""
    too_large: str = ""
    """The interpreter's CapacityError: PSUM."""

    @property
    def fits(self) -> bool:
        """Whether the program is within the limits."""
        return (
            not self.too_large
            and self.sbuf_bytes <= SBUF_USABLE_BYTES
            and self.num_instructions <= instruction_limit()
        )


def footprint(call: Call, function: Callable[..., Any]) -> Footprint:
    """Outline one call of its host function."""
    try:
        outline = outline_call(function, **call.arguments)
    except CapacityError as error:
        return Footprint(call.kernel, call.label, too_large=str(error))
    except ValueError as error:
        return Footprint(call.kernel, call.label, refused=str(error))
    return Footprint(call.kernel, call.label, outline.sbuf_bytes, outline.num_instructions)


def draw_footprints(
    kernel: str, samples: int, random: Random, advance: Advance = lambda amount: None
) -> list[Footprint]:
    """Footprints of random calls, until `samples` of them were not refused."""
    function = public_functions()[kernel]
    found: list[Footprint] = []
    accepted = 0
    while accepted < samples:
        found.append(footprint(DRAW[kernel](random), function))
        accepted += not found[-1].refused
        advance(int(not found[-1].refused))
    return found


def footprint_table(found: dict[str, list[Footprint]], wide: bool = False) -> str:
    """The extremes of each kernel."""
    rows: list[tuple[object, ...]] = []
    for kernel, footprints in found.items():
        accepted = [f for f in footprints if not f.refused]
        over = [f for f in accepted if not f.fits]
        long = sum(f.num_instructions > LONG_PROGRAM for f in accepted)
        counts = len(accepted), len(footprints) - len(accepted), len(over), long
        sbuf = max(accepted, key=lambda f: f.sbuf_bytes)
        rows.append((kernel, *counts, sbuf.sbuf_bytes, "", sbuf.label))
        program = max(accepted, key=lambda f: f.num_instructions)
        rows.append(("", "", "", "", "", "", program.num_instructions, program.label))
    heads = columns(
        "kernel", ">shapes", ">refused", ">over", ">long", ">SBUF B", ">instr.", "+with"
    )
    title = (
        f"Largest programs (limits: {SBUF_USABLE_BYTES} B of SBUF per partition, "
        f"{instruction_limit()} instructions; long: above {LONG_PROGRAM})"
    )
    return table(title, heads, rows, wide=wide)


def add_arguments(parser: ArgumentParser) -> None:
    """Which shapes, and how many."""
    parser.add_argument("--kernel", choices=tuple(DRAW), help="this kernel only")
    parser.add_argument("--samples", type=int, default=100, help="shapes of each kernel (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes (0)")
    parser.add_argument("--out", type=Path, help="write every shape's numbers here as it goes")
    parser.add_argument("--wide", action="store_true", help="all columns of the table")


def run(options: Namespace) -> int:
    """Outline random shapes; 1 if a program is too large."""
    if options.samples < 1:
        options.parser.error(f"--samples={options.samples}: must be at least 1")
    out = OutputFile(options.out) if options.out else None
    found: dict[str, list[Footprint]] = {}
    for kernel in [options.kernel] if options.kernel else DRAW:
        with phase(kernel, options.samples) as advance:
            drawn = draw_footprints(kernel, options.samples, Random(options.seed), advance)
        found[kernel] = drawn
        every = [f for footprints in found.values() for f in footprints]
        if out:
            out.save_json([asdict(f) for f in every])
    over = [f for f in every if not f.fits]
    if options.json:
        print(json.dumps([asdict(f) for f in every], indent=1))
        return 1 if over else 0
    print(footprint_table(found, options.wide))
    reasons = Counter(f"{f.kernel}: {f.refused.partition(':')[0]}" for f in every if f.refused)
    for reason, count in reasons.items():
        print(f"refused {count} x {reason}")
    for f in over:
        needed = f.too_large or f"{f.sbuf_bytes} B, {f.num_instructions} instructions"
        print(f"over: {f.kernel} {f.label}: {needed}")
    return 1 if over else 0
