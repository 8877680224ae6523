"""Moving a tile of which only a part was written.

A copy or transpose computes nothing: an element that nothing wrote harms nobody who does not use
it, so it arrives as not written, and the instruction that does use it reports it. A source that
nothing wrote at all, or a gap that would land on written elements, is reported where it moves.
"""

from __future__ import annotations

from collections.abc import Callable

from ..dtypes import Array, cast
from ..tensor import NkiTensor
from .execute import put_where, view_of


def move_written_part(
    dst: NkiTensor,
    src: NkiTensor,
    instruction: str,
    arrange: Callable[[Array], Array],
) -> bool:
    """Move the written elements of a partly written `src`; False where there is no such case.

    `arrange` brings the elements of src into the shape of dst.
    """
    view = view_of(src, instruction, "src")
    if view.known:
        return False
    missing = src.storage.unwritten_in(view)
    if missing is None or missing.all():
        return False
    out = view_of(dst, instruction, "dst")
    never_written = dst.storage.unwritten_in(out)
    gaps = arrange(missing).reshape(out.layout.shape)
    if never_written is None or not never_written[gaps].all():
        return False
    storage = src.storage
    if storage.watch is not None:
        storage.watch.before_read(storage, view, instruction, "src")
    values = arrange(view.array).reshape(out.layout.shape)
    if out.layout.dtype != view.layout.dtype:
        values = cast(values, out.layout.dtype)
    put_where(dst, values, ~gaps, instruction)
    return True


def nothing_to_move(dst: NkiTensor, src: NkiTensor) -> bool:
    """Whether nothing wrote any element of src and of dst: dst may then stay as it is."""
    for t in (src, dst):
        missing = None if t.storage.written else t.storage.unwritten_in(t.v)
        if missing is None or not missing.all():
            return False
    return True
