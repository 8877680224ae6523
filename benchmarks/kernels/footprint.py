"""`segattn bench footprint`: SBUF bytes and instructions of the kernels over supported shapes.

Shapes are drawn at random from all that the documentation allows (`shapes.py`) and outlined
without data (`outline.py`), fallbacks included. A call that the host function refuses with a
ValueError counts as refused; a program that needs more than there is fails the command.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from segattn.benchmarks.kernels.modelled import public_functions
from segattn.benchmarks.kernels.outline import outline_call
from segattn.benchmarks.kernels.shapes import DRAW, Call
from segattn.benchmarks.whole_tables import print_whole
from segattn.reference.extras import MissingExtraError
from segattn.reference.nki.errors import CapacityError
from segattn.reference.nki.regions import SBUF_USABLE_BYTES

try:
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise MissingExtraError("rich", "cli") from error


def instruction_limit() -> int:
    """Most instructions of one core's program after unrolling, as the host functions keep it."""
    # Imported late: the backend is chosen when the kernels are imported first.
    plan = import_module("segattn.kernels.launch_plan")
    limit: int = plan.INSTRUCTION_LIMIT
    return limit


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


def draw_footprints(kernel: str, samples: int, random: Random) -> list[Footprint]:
    """Footprints of random calls, until `samples` of them were not refused."""
    function = public_functions()[kernel]
    found: list[Footprint] = []
    accepted = 0
    while accepted < samples:
        found.append(footprint(DRAW[kernel](random), function))
        accepted += not found[-1].refused
    return found


def footprint_table(found: dict[str, list[Footprint]]) -> Table:
    """The extremes of each kernel."""
    table = Table(
        title=f"Largest programs (limits: {SBUF_USABLE_BYTES} B of SBUF per partition, "
        f"{instruction_limit()} instructions)",
        title_justify="left",
    )
    columns = ("shapes", "refused", "over", "SBUF B", "instructions")
    table.add_column("kernel")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("with")
    for kernel, footprints in found.items():
        accepted = [f for f in footprints if not f.refused]
        over = [f for f in accepted if not f.fits]
        counts = [str(len(accepted)), str(len(footprints) - len(accepted)), str(len(over))]
        sbuf = max(accepted, key=lambda f: f.sbuf_bytes)
        table.add_row(kernel, *counts, str(sbuf.sbuf_bytes), "", sbuf.label)
        program = max(accepted, key=lambda f: f.num_instructions)
        table.add_row("", "", "", "", "", str(program.num_instructions), program.label)
    return table


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    made = argparse.ArgumentParser("segattn bench footprint", description=__doc__)
    made.add_argument("--kernel", choices=tuple(DRAW), help="this kernel only")
    made.add_argument("--samples", type=int, default=100, help="shapes of each kernel")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", type=Path, help="write every shape's numbers here")
    return made


def main(argv: Sequence[str]) -> int:
    """Command line; 1 if a program is too large."""
    options = parser().parse_args(argv)
    if options.samples < 1:
        parser().error(f"--samples={options.samples}: must be at least 1")
    console = Console()
    found: dict[str, list[Footprint]] = {}
    for kernel in [options.kernel] if options.kernel else DRAW:
        begin = time.perf_counter()
        found[kernel] = draw_footprints(kernel, options.samples, Random(options.seed))
        print(f"{kernel}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    print_whole(console, footprint_table(found))
    every = [f for footprints in found.values() for f in footprints]
    reasons = Counter(f"{f.kernel}: {f.refused.partition(':')[0]}" for f in every if f.refused)
    for reason, count in reasons.items():
        console.print(f"refused {count} x {reason}", highlight=False, soft_wrap=True)
    over = [f for f in every if not f.fits]
    for f in over:
        needed = f.too_large or f"{f.sbuf_bytes} B, {f.num_instructions} instructions"
        console.print(f"over: {f.kernel} {f.label}: {needed}", highlight=False, soft_wrap=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(f) for f in every], indent=1))
    return 1 if over else 0
