"""Rule "operand_overlap": an instruction that reads bytes which it also writes elsewhere.

In place, element by element, is fine. Where the destination is a shifted or permuted part of the
source, what is read depends on how far the engine or the DMA queues have come. Column operands are
read before, and results of reductions written after the elements, so only operands of the
destination's size count.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..access_pattern import resolve
from ..strict import level, violation
from ..tensor import NkiTensor
from ..view import View
from .operands import free_steps

_MAX_WORK: Final = 10_000
_MAY_OVERLAP: Final = frozenset({"nc_stream_shuffle"})
"""Instructions that are documented to work in place although they move elements."""
_overlaps: dict[tuple[object, ...], bool] = {}


def check_overlap(opcode: str, dst: NkiTensor, src: NkiTensor) -> None:
    """Report that two views of one storage overlap other than element by element."""
    if opcode in _MAY_OVERLAP:
        return
    me = f"nisa.{opcode}"
    out, source = _now(dst, me), _now(src, me)
    if out is None or source is None:
        return
    key = (out.layout, out.offset, source.layout, source.offset)
    found = _overlaps.get(key)
    if found is None:
        found = _overlaps[key] = _shifted(out, source)
    if found and level("operand_overlap") != "off":
        violation(
            "operand_overlap",
            f"{me}: dst and an operand are overlapping parts of {dst.name!r} "
            f"(shapes {out.layout.shape} and {source.layout.shape}) but not the same elements in "
            "the same order, so what is read depends on timing; go through another tile",
        )


def _now(t: NkiTensor, me: str) -> View | None:
    """What an operand means at its run-time address; None for rows, or where nothing is moved."""
    if t.dynamic is None:
        return t.v
    return None if t.dynamic.vector else resolve(t, me)


def _shifted(out: View, source: View) -> bool:
    a, b = out.layout, source.layout
    if a.size != b.size:
        return False
    same_start = out.offset == source.offset and a.itemsize == b.itemsize
    if same_start and free_steps(a) == free_steps(b) and a.strides[0] == b.strides[0]:
        return False
    try:
        # NumPy's stub lists two of the allowed numbers
        work: Any = _MAX_WORK
        return bool(np.shares_memory(out.array, source.array, max_work=work))
    except np.exceptions.TooHardError:
        return False
