"""Sequencer registers, and queries of the target."""

from __future__ import annotations

from typing import Any, Final, SupportsIndex

import numpy as np

from .. import trace
from ..core import current
from ..dtypes import INTEGERS, cast
from ..errors import NkiValidationError, RunTimeValueError
from ..records import Access
from ..regions import HBM, SBUF
from ..registers import RunTimeValue, VirtualRegister, integer
from ..tensor import NkiTensor
from .enums import nc_version
from .execute import account, handed_over, put, raw

_REGIONS: Final = HBM | {SBUF}


def register_alloc(x: int | None = None) -> VirtualRegister:
    """A 32-bit register, uninitialised or holding the integer x."""
    given: Any = x
    if x is not None and (isinstance(given, RunTimeValue) or not isinstance(x, SupportsIndex)):
        raise RunTimeValueError(
            f"nisa.register_alloc: x is {type(x).__name__}; allowed: None or an integer "
            "(load a tensor element with nisa.register_load)"
        )
    return VirtualRegister(None if x is None else _fits("nisa.register_alloc", x.__index__()))


def register_move(dst: VirtualRegister, src: VirtualRegister | int) -> None:
    """Store dst = src, an integer or a register."""
    me = "nisa.register_move"
    given: Any = src
    if isinstance(given, RunTimeValue) and not isinstance(given, VirtualRegister):
        raise NkiValidationError(
            f"{me}: src is {given.what}; allowed: an int or a register (the scalar itself bounds "
            "loops and addresses tensors, nisa.scalar_store writes it)"
        )
    _register(me, "dst", dst).set(_fits(me, integer(f"{me}: src", src)), me)
    record("register_move", (dst,), (src,))


def register_load(dst: VirtualRegister, src: NkiTensor) -> None:
    """Store dst = the one element of src (integer dtype, HBM or SBUF)."""
    me = "nisa.register_load"
    check_element(me, "src", src)
    if src.dtype not in INTEGERS:
        raise NkiValidationError(
            f"{me}: operand src {src.name!r} has dtype {src.dtype}; allowed here: integers of at "
            "most 32 bits, which bound loops and address tensors; cast it with nisa.tensor_copy "
            "first, or load an int64 with nisa.scalar_load"
        )
    _register(me, "dst", dst).set(int(raw(src, me, "src").reshape(-1)[0]), me)
    record("register_load", (dst,), (src,))


def register_store(dst: NkiTensor, src: VirtualRegister) -> None:
    """The one element of dst = src."""
    me = "nisa.register_store"
    check_element(me, "dst", dst)
    value = np.full(dst.v.layout.shape, _register(me, "src", src).value, np.int64)
    put(dst, value if dst.dtype in INTEGERS else cast(value, dst.dtype), me)
    record("register_store", (dst,), (src,))


def _register(me: str, operand: str, x: Any) -> VirtualRegister:
    if not isinstance(x, VirtualRegister):
        raise NkiValidationError(
            f"{me}: operand {operand} is {type(x).__name__}; allowed: a register"
        )
    return x


def _fits(me: str, value: int) -> int:
    """An immediate of 32 bits, signed or not."""
    if not -(2**31) <= value < 2**32:
        raise NkiValidationError(
            f"{me}: the integer {value} does not fit a 32-bit register; allowed: -2**31..2**32-1"
        )
    return value


def check_element(me: str, operand: str, t: Any) -> None:
    """NkiValidationError unless t is one element in HBM or SBUF."""
    if not isinstance(t, NkiTensor) or t.size != 1:
        raise NkiValidationError(
            f"{me}: operand {operand} must be a tensor with one element, got "
            f"{t.shape if isinstance(t, NkiTensor) else type(t).__name__}"
        )
    if t.buffer not in _REGIONS:
        raise NkiValidationError(
            f"{me}: operand {operand} is in {t.buffer.value}; allowed: HBM or SBUF"
        )


def record(opcode: str, writes: tuple[object, ...], reads: tuple[object, ...]) -> None:
    """Count and record an instruction of the sequencer; integer constants are no operands."""
    number = account(_tensors(writes), _tensors(reads))
    recorder = trace.active
    if recorder is not None:
        recorder.compute("sync", opcode, current().index, _accesses(writes), _accesses(reads))
    handed_over(number)


def _tensors(operands: tuple[object, ...]) -> tuple[NkiTensor, ...]:
    return tuple([x for x in operands if isinstance(x, NkiTensor)])


def _accesses(operands: tuple[object, ...]) -> tuple[Access, ...]:
    return tuple([x.access for x in operands if isinstance(x, (NkiTensor, RunTimeValue))])


def get_nc_version() -> nc_version:
    """The generation of the target: trn2 is gen3."""
    return nc_version.gen3


def get_nc_sub_version() -> int:
    """The silicon revision of the target."""
    return 0
