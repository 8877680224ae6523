"""Rule "accumulate_none": a matmul that leaves it to the compiler whether it adds, on used PSUM."""

from __future__ import annotations

from ..dtypes import Array
from ..storage import Storage
from ..strict import violation
from ..view import View


def check_inferred_group(me: str, storage: Storage, view: View, adds: bool | Array) -> None:
    """accumulate=None starts a group on fresh PSUM, or goes on with one not yet read."""
    psum = storage.psum
    assert psum is not None
    if adds is not False and psum.chains.was_read(view):
        what = "already held sums that an instruction has read, so this matmul adds to them"
    elif adds is not True and psum.filled and _holds_other_values(storage, view, adds):
        what = "was written by something other than a matmul before, which it may keep or replace"
    else:
        return
    violation(
        "accumulate_none",
        f"{me}: accumulate=None on dst {storage.name!r} of shape {view.layout.shape}, which {what}"
        "; say accumulate=False on the first matmul of a group and True on the others",
    )


def _holds_other_values(storage: Storage, view: View, sums: bool | Array) -> bool:
    """Whether an element under the view is written and no sum of the group."""
    missing = storage.unwritten_in(view)
    return missing is None or not bool((missing | sums).all())
