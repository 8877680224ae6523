"""Instructions on tiles of which only a part was written.

The hardware moves, and computes with, whatever an unwritten element holds. The element of the
result is then as undefined as the source, and harms nobody who does not use it: it counts as not
written, also where the destination was. Whoever uses it (a reduction, a matmul, a DMA off the
chip, ...) reports it, with the line of the first instruction that computed with it. A source that
nothing wrote at all is reported where it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import numpy as np

from ..dtypes import Array, cast, sentinel
from ..errors import kernel_line
from ..storage import GapOrigin, Storage, View, unwritten_text
from ..strict import level
from ..tensor import NkiTensor
from .execute import view_of


class Gaps:
    """Lets one instruction read its unwritten elements; afterwards its results count as such."""

    def __init__(
        self,
        dst: NkiTensor,
        sources: list[tuple[Storage, View, Array]],
        gaps: Array,
        origin: GapOrigin | None,
    ) -> None:
        self.dst = dst
        self.sources = sources
        self.gaps = gaps
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
            self.dst.storage.forget_written(view_of(self.dst, "", "dst"), self.gaps, self.origin)


def computed_gaps(me: str, dst: NkiTensor, **operands: object) -> Gaps | None:
    """The gaps that an elementwise instruction makes in dst; None when there are none.

    The operands have dst's size or one column.
    """
    if level("uninitialized_read") == "off":
        return None
    sources: list[tuple[Storage, View, Array]] = []
    gaps: Array | None = None
    origin: GapOrigin | None = None
    shape = dst.v.layout.shape
    for operand, t in operands.items():
        if not isinstance(t, NkiTensor) or t.storage.written or t.v.known:
            continue
        view = view_of(t, me, operand)
        missing = t.storage.unwritten_in(view)
        if missing is None:
            continue
        if missing.all():
            return None
        sources.append((t.storage, view, missing))
        if origin is None:
            origin = t.storage.gap_origin
        if origin is None:
            text = unwritten_text(me, operand, t.name, view, missing)
            origin = GapOrigin(text, *kernel_line())
        same_size = view.layout.size == dst.v.layout.size
        missing = missing.reshape(shape if same_size else (-1,) + (1,) * (len(shape) - 1))
        gaps = missing if gaps is None else gaps | missing
    if gaps is None:
        return None
    return Gaps(dst, sources, np.broadcast_to(gaps, shape), origin)


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
    return Gaps(dst, [(src.storage, view, missing)], gaps, src.storage.gap_origin)


def nothing_to_move(dst: NkiTensor, src: NkiTensor) -> bool:
    """Whether nothing wrote any element of src and of dst: dst may then stay as it is."""
    for t in (src, dst):
        missing = None if t.storage.written else t.storage.unwritten_in(t.v)
        if missing is None or not missing.all():
            return False
    return True
