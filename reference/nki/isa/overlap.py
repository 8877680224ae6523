"""Rule "operand_overlap": an instruction that reads bytes which it also writes elsewhere.

In place, element by element, is fine. Where the destination is a shifted or permuted part of the
source, what is read depends on how far the engine or the DMA queues have come. Column operands are
read before, and results of reductions written after the elements, so only operands of the
destination's size count.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..access_pattern import resolve, row_indices
from ..strict import level, violation
from ..tensor import NkiTensor
from ..view import View
from .operands import free_steps

_MAX_WORK: Final = 10_000
_MAY_OVERLAP: Final = frozenset({"nc_stream_shuffle"})
"""Instructions that are documented to work in place although they move elements."""
_TURNS: Final = frozenset({"dma_transpose"})
"""Instructions whose elements change places also where dst is the source."""
_overlaps: dict[tuple[object, ...], bool] = {}


def check_overlap(opcode: str, dst: NkiTensor, src: NkiTensor) -> None:
    """Report that two views of one storage overlap other than element by element."""
    if opcode in _MAY_OVERLAP:
        return
    me = f"nisa.{opcode}"
    chosen = [t for t in (dst, src) if t.dynamic is not None and t.dynamic.vector]
    if chosen:
        number = chosen[0].shape[0]
        found = _rows_shifted(_rows(dst, number, me), _rows(src, number, me))
    else:
        (out,), (source,) = _rows(dst, 1, me), _rows(src, 1, me)
        if out is None or source is None:
            return
        key = (out.layout, out.offset, source.layout, source.offset, opcode in _TURNS)
        found = _overlaps.get(key, False)
        if key not in _overlaps:
            found = _overlaps[key] = _shifted(out, source, opcode in _TURNS)
    if found and level("operand_overlap") != "off":
        violation(
            "operand_overlap",
            f"{me}: dst and an operand are overlapping parts of {dst.name!r} "
            f"(shapes {dst.shape} and {src.shape}) but not the same elements in "
            "the same order, so what is read depends on timing; go through another tile",
        )


def _rows(t: NkiTensor, number: int, me: str) -> list[View | None]:
    """What an operand means now, by rows if its `number` is not 1; None where nothing is moved."""
    dynamic, layout, first = t.dynamic, t.v.layout, t.v.offset
    starts: list[int | None]
    if dynamic is not None and dynamic.vector:
        indices, valid = row_indices(t, me)
        starts = [
            dynamic.step * int(i) if ok else None for i, ok in zip(indices, valid, strict=True)
        ]
    else:
        view = t.v if dynamic is None else resolve(t, me)
        if number == 1 or view is None or layout.shape[0] != number:
            return [view]
        first = view.offset
        starts = [layout.strides[0] * i for i in range(number)]
    shape, strides = (1, *layout.shape[1:]), (0, *layout.strides[1:])
    return [
        None if at is None else t.storage.view(layout.dtype, shape, strides, first + at)
        for at in starts
    ]


def _rows_shifted(out: list[View | None], source: list[View | None]) -> bool:
    """Whether a row is written where another row, or another part of its own, is read."""
    return any(
        a is not None and b is not None and (_meet(a, b) if i != j else _shifted(a, b, False))
        for i, a in enumerate(out)
        for j, b in enumerate(source)
    )


def _shifted(out: View, source: View, turned: bool) -> bool:
    a, b = out.layout, source.layout
    if a.size != b.size:
        return False
    same_start = out.offset == source.offset and a.itemsize == b.itemsize
    in_order = free_steps(a) == free_steps(b) and a.strides[0] == b.strides[0]
    return (turned or not (same_start and in_order)) and _meet(out, source)


def _meet(a: View, b: View) -> bool:
    """Whether two views of one storage share a byte, as far as that is quickly known."""
    try:
        # NumPy's stub lists two of the allowed numbers
        work: Any = _MAX_WORK
        return bool(np.shares_memory(a.array, b.array, max_work=work))
    except np.exceptions.TooHardError:
        return False
