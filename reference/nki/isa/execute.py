"""Reading operands, writing results and finishing an instruction: the hot path of every run."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from .. import trace
from ..access_pattern import out_of_bounds, resolve
from ..core import RUN, Core, current
from ..dtypes import INTEGERS, WIDE_INTEGERS, Array, cast
from ..errors import NkiValidationError, kernel_line
from ..records import Access, Engine
from ..rules.operands import check_dynamic_operands, check_same_partitions
from ..rules.psum_loops import check_psum_in_loop
from ..rules.psum_operands import check_psum_operand
from ..strict import violations
from ..strided import Dynamic
from ..tensor import NkiTensor
from ..view import View
from .enums import NkiInstruction
from .exactness import EXACT, check_exact, check_immediate
from .overlap import check_overlap

_F32: Final = np.dtype(np.float32)


def view_of(t: NkiTensor, instruction: str, operand: str) -> View:
    """The view an operand means now, at its run-time address."""
    if t.dynamic is None:
        return t.v
    if t.dynamic.vector:
        raise NkiValidationError(
            f"{instruction}: operand {operand} has a vector_offset; only dma_copy, "
            "dma_transpose and dma_compute gather rows"
        )
    view = resolve(t, instruction)
    if view is None:
        raise out_of_bounds(t, instruction, operand)
    return view


def raw(t: NkiTensor, instruction: str, operand: str, used: Array | None = None) -> Array:
    """The stored values of an operand that is read; reports unwritten bytes.

    `used` marks the elements that the instruction does not discard, None = all.
    """
    view = t.v if t.dynamic is None else view_of(t, instruction, operand)
    storage = t.storage
    if storage.watch is not None:
        storage.watch.before_read(storage, view, instruction, operand)
    if not view.known:
        storage.check_written(view, instruction, operand, used)
    return view.array


def fp32(t: NkiTensor, instruction: str, operand: str, used: Array | None = None) -> Array:
    """The values of an operand in float32, as the engines compute; do not modify."""
    view = t.v if t.dynamic is None else view_of(t, instruction, operand)
    storage = t.storage
    if storage.watch is not None:
        storage.watch.before_read(storage, view, instruction, operand)
    if not view.known:
        storage.check_written(view, instruction, operand, used)
    array = view.array
    if array.dtype is _F32:
        return array
    if view.f32_version == storage.version and view.f32 is not None:
        return view.f32
    shadow = array.astype(np.float32)
    if view.layout.dtype in WIDE_INTEGERS:
        before = violations()
        check_exact(array, shadow, instruction, operand)
        if violations() != before:
            return shadow  # not kept, so that the next read asks the rule again
    if view.layout.on_chip:
        view.f32 = shadow
        view.f32_version = storage.version
    return shadow


def operand_value(x: object, ndim: int, instruction: str, operand: str) -> Array | np.float32:
    """A scalar or [P, 1] operand in float32, ready to broadcast against `ndim` dimensions."""
    if isinstance(x, NkiTensor):
        column = fp32(x, instruction, operand)
        if column.ndim != ndim:
            column = column.reshape((column.shape[0],) + (1,) * (ndim - 1))
        return column
    number: Any = x
    if not -EXACT <= number <= EXACT:
        check_immediate(number, instruction, operand)
    return np.float32(x)  # type: ignore[arg-type]  # validated: a number


def target(t: NkiTensor, instruction: str) -> View:
    """The view of a destination, marked as written by something other than a matmul sum."""
    view = t.v if t.dynamic is None else view_of(t, instruction, "dst")
    storage = t.storage
    if storage.watch is not None:
        storage.watch.before_write(storage, view, instruction)
    psum = storage.psum
    if psum is not None:
        psum.filled = True
        if psum.any_sum:
            psum.overwrite(view, storage)
    if not view.known:
        storage.note_write(view)
    storage.version += 1
    return view


def put(t: NkiTensor, values: Array, instruction: str) -> None:
    """Cast float32 (or native) values to the destination's dtype and store them."""
    view = target(t, instruction)
    dtype = view.layout.dtype
    if dtype in INTEGERS or dtype == "tfloat32":
        values = cast(values, dtype)
    np.copyto(view.array, values, casting="unsafe")


def put_where(t: NkiTensor, values: Array, valid: Array, instruction: str) -> None:
    """Store only the elements that `valid` marks; the others stay as they are, written or not."""
    view = t.v if t.dynamic is None else view_of(t, instruction, "dst")
    storage = t.storage
    if storage.watch is not None:
        storage.watch.before_write(storage, view, instruction)
    psum = storage.psum
    if psum is not None:
        psum.filled = True
        if psum.any_sum:
            psum.overwrite(view, storage)
    np.copyto(view.array, values, where=valid)
    if not storage.written:
        storage.writes.mark(storage, view, valid)
    storage.version += 1


def finish(
    engine: Engine,
    opcode: str,
    writes: tuple[NkiTensor, ...],
    reads: tuple[NkiTensor, ...],
    op: str = "",
) -> NkiInstruction:
    """Count the instruction, note the tiles it used, record it, let the other core run.

    `account`, `index_accesses` and `handed_over` in one: every call counts here.
    """
    core = RUN.core
    if core is None:
        core = current()
    number = core.count
    core.count = number + 1
    if core.trips is not None:
        core.trips.note(writes, reads)
    recorder = trace.active
    dynamic = False
    wrote: list[Access] = []
    read: list[Access] = []
    for t in writes:
        use = t.storage.use
        if use is not None:
            use.last = number
            if use.first < 0:
                use.first = number
                use.first_line = kernel_line()
        if t.dynamic is not None:
            dynamic = True
            _use_index(t, number)
        if recorder is not None:
            wrote.append(t.access if t.dynamic else t.v.access or t.access)
        if t.storage.psum is not None:
            use_psum(core, opcode, t, reads=False)
    if len(reads) > 1:
        start = reads[0].v.layout.start
        if start != reads[1].v.layout.start or start != reads[-1].v.layout.start:
            check_same_partitions(opcode, reads)
    written = writes[0].storage if writes else None
    for t in reads:
        storage = t.storage
        use = storage.use
        if use is not None:
            use.last = number
        if storage is written and (t.v is not writes[0].v or t.dynamic is not None):
            check_overlap(opcode, writes[0], t)
        if t.dynamic is not None:
            dynamic = True
            _use_index(t, number)
        if recorder is not None:
            read.append(t.access if t.dynamic else t.v.access or t.access)
        if storage.psum is not None:
            use_psum(core, opcode, t, reads=True)
    if dynamic:
        check_dynamic_operands(opcode, writes, reads)
    if recorder is not None:
        if dynamic:
            read += index_accesses(writes, reads)
        recorder.compute(engine, opcode, core.index, tuple(wrote), tuple(read), op)
    if core.switch is not None:
        core.switch()
    made: NkiInstruction = object.__new__(NkiInstruction)
    made.handle = number
    return made


def use_psum(core: Core, opcode: str, t: NkiTensor, *, reads: bool) -> None:
    """The rules for an operand in PSUM, at its run-time address."""
    view = t.v if t.dynamic is None else view_of(t, f"nisa.{opcode}", "in PSUM")
    storage = t.storage
    if not view.placed:
        check_psum_operand(f"nisa.{opcode}", storage, view)
    if core.region is not None:
        check_psum_in_loop(f"nisa.{opcode}", core, storage)
    if reads and storage.psum is not None:
        storage.psum.chains.read(view, f"nisa.{opcode}", storage.name)


def index_accesses(
    writes: tuple[NkiTensor, ...], reads: tuple[NkiTensor, ...]
) -> tuple[Access, ...]:
    """What the run-time addresses of the operands read: index tiles and registers."""
    return tuple([_index_access(t.dynamic) for t in (*writes, *reads) if t.dynamic is not None])


def _index_access(dynamic: Dynamic) -> Access:
    index: Any = dynamic.index
    found: Access = index.access
    return found


def account(writes: tuple[NkiTensor, ...], reads: tuple[NkiTensor, ...]) -> int:
    """Number this instruction and extend the live ranges of its tiles."""
    core = RUN.core
    if core is None:
        core = current()
    number = core.count
    core.count = number + 1
    if core.trips is not None:
        core.trips.note(writes, reads)
    for t in writes:
        use = t.storage.use
        if use is not None:
            use.last = number
            if use.first < 0:
                use.first = number
                use.first_line = kernel_line()
        if t.dynamic is not None:
            _use_index(t, number)
    for t in reads:
        use = t.storage.use
        if use is not None:
            use.last = number
        if t.dynamic is not None:
            _use_index(t, number)
    return number


def _use_index(t: NkiTensor, number: int) -> None:
    """The index tile of a run-time address is read by the instruction too."""
    index = None if t.dynamic is None else t.dynamic.index
    if isinstance(index, NkiTensor) and index.storage.use is not None:
        index.storage.use.last = number


def handed_over(number: int) -> NkiInstruction:
    """The instruction's handle, after the other core (if any) had its turn."""
    core = RUN.core
    if core is not None and core.switch is not None:
        core.switch()
    made: NkiInstruction = object.__new__(NkiInstruction)
    made.handle = number
    return made
