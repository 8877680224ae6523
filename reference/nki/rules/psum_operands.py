"""Rules "psum_bank" and "psum_alignment": where an operand lies in PSUM."""

from __future__ import annotations

from ..dtypes import DEVICE_ITEMSIZE
from ..regions import PSUM_BANK_BYTES
from ..storage import Storage
from ..strict import violation
from ..view import View

_WORD = 4


def check_psum_tile(name: str, row_bytes: int) -> None:
    """A PSUM tile lies in one bank."""
    if row_bytes > PSUM_BANK_BYTES:
        violation(
            "psum_bank",
            f"nl.ndarray: PSUM tile {name!r} has {row_bytes} bytes per partition; limit "
            f"{PSUM_BANK_BYTES}, one bank: use one tile for each",
        )


def check_psum_operand(me: str, storage: Storage, view: View) -> None:
    """An operand stays in one bank, and starts at a whole 4-byte word."""
    layout = view.layout
    size = DEVICE_ITEMSIZE[layout.dtype]
    first = storage.first_byte % PSUM_BANK_BYTES + view.offset % layout.row * size
    last = first + layout.span // layout.itemsize * size - 1
    view.placed = True
    if first // PSUM_BANK_BYTES != last // PSUM_BANK_BYTES:
        view.placed = False
        violation(
            "psum_bank",
            f"{me}: operand {storage.name!r} of shape {layout.shape} spans bytes {first}..{last} "
            f"from the start of its PSUM bank; limit {PSUM_BANK_BYTES}: use one instruction for "
            "each bank",
        )
    if size == 2 and first % _WORD:
        view.placed = False
        violation(
            "psum_alignment",
            f"{me}: operand {storage.name!r} of shape {layout.shape} and dtype {layout.dtype} "
            f"starts at byte {first} of PSUM; allowed: multiples of {_WORD} (an even element)",
        )
