"""Instructions on tiles of which only a part was written.

The hardware moves, and computes with, whatever an unwritten element holds. The element of the
result is then as undefined as the source, and harms nobody who does not use it: it counts as not
written, also where the destination was. Whoever uses it (a matmul, an index, a DMA off the chip,
...) reports it, with the line of the first instruction that computed with it. A reduction hands on
partitions of which nothing is written. A source that nothing wrote at all is reported where it is
read, and so is a reduction over a row of which only a part is.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import numpy as np

from ..dtypes import Array, cast, sentinel
from ..errors import kernel_line
from ..storage import Storage, unwritten_text
from ..strict import level
from ..tensor import NkiTensor
from ..view import GapOrigin, View
from .execute import view_of


def is_known(operand: object) -> bool:
    """Whether an operand is no tensor, or one whose elements are known to be written."""
    return type(operand) is not NkiTensor or operand.v.known


class Gaps:
    """Lets one instruction read its unwritten elements; afterwards its results count as such."""

    def __init__(
        self,
        gaps: list[tuple[NkiTensor, Array]],
        sources: list[tuple[Storage, View, Array]],
        origin: GapOrigin | None,
    ) -> None:
        self.gaps = gaps
        self.sources = sources
        self.origin = origin

    def __enter__(self) -> None:
        for storage, view, missing in self.sources:
            dtype = view.layout.dtype
            view.array[missing] = cast(np.asarray(sentinel(dtype)), dtype)
            storage.version += 1
            view.known = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _, view, _ in self.sources:
            view.known = False
        if kind is None:
            for dst, elements in self.gaps:
                dst.storage.forget_written(view_of(dst, "", "dst"), elements, self.origin)


def computed_gaps(me: str, dst: NkiTensor, **operands: object) -> Gaps | None:
    """The gaps that an elementwise instruction makes in dst; None when there are none.

    The operands have dst's size or one column.
    """
    sources, origin = _partly_written(me, operands)
    if not sources:
        return None
    shape = dst.v.layout.shape
    gaps = np.zeros(shape, np.bool_)
    for _, view, missing in sources:
        same_size = view.layout.size == dst.v.layout.size
        gaps |= missing.reshape(shape if same_size else (-1,) + (1,) * (len(shape) - 1))
    return Gaps([(dst, gaps)], sources, origin)


def row_gaps(me: str, results: tuple[NkiTensor | None, ...], **operands: object) -> Gaps | None:
    """The partitions of the results that come from partitions of which nothing is written.

    None when there are none, or when a partition is partly written: that one is reported.
    """
    sources, origin = _partly_written(me, operands)
    if not sources:
        return None
    rows = np.zeros(sources[0][1].layout.partitions, np.bool_)
    for _, _, missing in sources:
        flat = missing.reshape(len(rows), -1)
        if (flat.any(axis=1) != flat.all(axis=1)).any():
            return None
        rows |= flat.any(axis=1)
    gaps = []
    for t in results:
        if t is not None:
            column = rows.reshape((-1,) + (1,) * (t.v.layout.ndim - 1))
            gaps.append((t, np.broadcast_to(column, t.v.layout.shape)))
    return Gaps(gaps, sources, origin)


def _partly_written(
    me: str, operands: dict[str, object]
) -> tuple[list[tuple[Storage, View, Array]], GapOrigin | None]:
    """The operands with gaps, and who read them first; none of them when one is all gap."""
    sources: list[tuple[Storage, View, Array]] = []
    origin: GapOrigin | None = None
    if level("uninitialized_read") == "off":
        return [], None
    for operand, t in operands.items():
        if not isinstance(t, NkiTensor) or t.storage.written or t.v.known:
            continue
        view = view_of(t, me, operand)
        missing = t.storage.unwritten_in(view)
        if missing is None:
            continue
        if missing.all():
            return [], None
        sources.append((t.storage, view, missing))
        if origin is None:
            text = unwritten_text(me, operand, t.name, view, missing)
            origin = t.storage.gap_origin or GapOrigin(text, *kernel_line())
    return sources, origin


def moved_gaps(
    me: str, dst: NkiTensor, src: NkiTensor, arrange: Callable[[Array], Array]
) -> Gaps | None:
    """The gaps that a move makes in dst; `arrange` brings the elements of src into its shape."""
    if src.storage.written or level("uninitialized_read") == "off":
        return None
    view = view_of(src, me, "src")
    missing = None if view.known else src.storage.unwritten_in(view)
    if missing is None or missing.all():
        return None
    gaps = arrange(missing).reshape(dst.v.layout.shape)
    return Gaps([(dst, gaps)], [(src.storage, view, missing)], src.storage.gap_origin)


def nothing_to_move(dst: NkiTensor, src: NkiTensor) -> bool:
    """Whether nothing wrote any element of src and of dst: dst may then stay as it is."""
    for t in (src, dst):
        missing = None if t.storage.written else t.storage.unwritten_in(t.v)
        if missing is None or not missing.all():
            return False
    return True
