"""What nc_matmul demands of its operands: shapes, dtypes, buffers, and tiles of the PE array."""

from __future__ import annotations

from typing import Any, Final

from ..core import current
from ..dtypes import FP8
from ..errors import NkiValidationError
from ..layout import Layout
from ..regions import PSUM_BANK_BYTES
from ..rules.psum_loops import note_tensor_engine_write
from ..storage import Storage
from ..strict import violation
from ..tensor import NkiTensor
from ..view import View
from .enums import matmul_perf_mode
from .operands import PSUM_ONLY, SBUF_ONLY, allowed_starts, check_destination, check_tile

_INPUTS: Final = frozenset(
    {"float8_e4m3", "float8_e5m2", "bfloat16", "float16", "tfloat32", "float32"}
)
_WIDE: Final = frozenset({"tfloat32", "float32"})
MAX_ROWS: Final = 128
MAX_STATIONARY: Final = 128
MAX_MOVING: Final = 512


class MatmulPlan:
    """Shapes of a validated matmul: K x M stationary, K x N moving, M x N result."""

    __slots__ = ("double_row", "k", "m", "n", "tile_size")

    def __init__(self, k: int, m: int, n: int, double_row: bool, tile_size: Any) -> None:
        self.k = k
        self.m = m
        self.n = n
        self.double_row = double_row
        self.tile_size: tuple[int, int] = tile_size


def plan_matmul(
    me: str,
    dst: Any,
    stationary: Any,
    moving: Any,
    is_transpose: bool,
    tile_position: Any,
    tile_size: Any,
    perf_mode: Any,
) -> MatmulPlan:
    pe = "the Tensor Engine reads SBUF and writes PSUM"
    out = check_tile(me, "dst", dst, regions=PSUM_ONLY, why=pe)
    left = check_tile(
        me,
        "stationary",
        stationary,
        regions=SBUF_ONLY,
        why=pe,
        dtypes=None if is_transpose else _INPUTS,
    )
    right = check_tile(
        me,
        "moving",
        moving,
        regions=SBUF_ONLY,
        why=pe,
        dtypes=None if is_transpose else _INPUTS,
    )
    check_destination(me, dst)
    if not isinstance(perf_mode, matmul_perf_mode):
        raise NkiValidationError(
            f"{me}: perf_mode {perf_mode!r}; allowed: nisa.matmul_perf_mode.none, double_row"
        )
    rows, columns = _tiling(me, tile_position, tile_size)
    double = perf_mode is matmul_perf_mode.double_row
    if double:
        _check_double_row(me, left, right, columns, is_transpose)
    m, n = left.free // (2 if double else 1), right.free // (2 if double else 1)
    if left.partitions != right.partitions:
        raise NkiValidationError(
            f"{me}: stationary has {left.partitions} partitions, moving {right.partitions}; the "
            "contraction dimension must agree"
        )
    for operand, what, value, limit in (
        ("stationary", "partitions (K)", left.partitions, rows),
        ("stationary", "elements per partition (M)", m, columns),
        ("moving", "elements per partition (N)", n, MAX_MOVING),
    ):
        if value > limit:
            raise NkiValidationError(f"{me}: operand {operand} has {value} {what}; limit {limit}")
    _check_dtypes(me, out, left, right, is_transpose)
    if out.partitions != m or out.free != n:
        raise NkiValidationError(
            f"{me}: dst has shape {out.shape}; needed [{m}, {n}] from stationary {left.shape} and "
            f"moving {right.shape}"
        )
    return MatmulPlan(left.partitions, m, n, double, (rows, columns))


def _tiling(me: str, position: Any, size: Any) -> tuple[int, int]:
    """Rows and columns of the PE array in use."""
    if not size and not position:
        return MAX_ROWS, MAX_STATIONARY
    if len(tuple(position or ())) != 2 or len(tuple(size or ())) != 2:
        raise NkiValidationError(
            f"{me}: tile_position {position} and tile_size {size} must both be given, as "
            "(row, column) pairs"
        )
    for axis, start, extent in zip(("row", "column"), position, size, strict=True):
        if extent not in (32, 64, 128):
            raise NkiValidationError(f"{me}: tile_size {axis} {extent}; allowed: 32, 64, 128")
        if start % extent or not 0 <= start < 128:
            raise NkiValidationError(
                f"{me}: tile_position {axis} {start}; allowed: multiples of {extent} below 128"
            )
    return int(size[0]), int(size[1])


def check_tensor_engine_write(me: str, storage: Storage, view: View) -> None:
    """The Tensor Engine writes inside one bank, and inside a device loop PSUM of that loop.

    Not part of the plan: it depends on the address.
    """
    note_tensor_engine_write(me, current(), storage)
    layout = view.layout
    first = (storage.first_byte + layout.free_byte(view.offset)) % PSUM_BANK_BYTES
    if first + layout.span > PSUM_BANK_BYTES:
        raise NkiValidationError(
            f"{me}: dst {storage.name!r} spans bytes {first}..{first + layout.span - 1} from the "
            f"start of its PSUM bank; the Tensor Engine writes one bank of {PSUM_BANK_BYTES} bytes"
        )


def check_position(me: str, operand: str, t: NkiTensor, first: int, axis: str) -> None:
    """Row r of the PE array reads partition r of SBUF, column c writes partition c of PSUM.

    A tile without an address may be placed by the compiler at any start that its size allows.
    """
    storage = t.storage
    start = t.v.layout.start
    rows = storage.num_rows
    bases = [0]
    if not storage.in_arena:
        bases = [base for base in allowed_starts(rows) if base + rows <= MAX_ROWS]
    if first not in [base + start for base in bases]:
        violation(
            "start_partition",
            f"{me}: tile_position {axis} {first} with operand {operand} {t.name!r} at partition "
            f"{start} of {rows}; the {axis}s of the array are the partitions of the operand: use "
            f"tile_position {axis} {start}, or the partitions from {first} on",
        )


def _check_double_row(
    me: str, left: Layout, right: Layout, columns: int, is_transpose: bool
) -> None:
    for operand, layout in (("stationary", left), ("moving", right)):
        if layout.dtype not in FP8:
            raise NkiValidationError(
                f"{me}: operand {operand} has dtype {layout.dtype}; double_row takes "
                "float8_e4m3 and float8_e5m2"
            )
        if layout.ndim < 3 or layout.shape[1] != 2:
            raise NkiValidationError(
                f"{me}: operand {operand} has shape {layout.shape}; double_row needs [K, 2, free]"
            )
    if columns != MAX_STATIONARY or is_transpose:
        raise NkiValidationError(
            f"{me}: double_row cannot be combined with column tiling or transpose mode"
        )


def check_transposed_dtype(me: str, data: Layout) -> None:
    """The Tensor Engine turns fp8 into 16-bit elements whose upper byte is zero."""
    if data.dtype in FP8:
        raise NkiValidationError(
            f"{me}: data has dtype {data.dtype}; a transpose of the Tensor Engine writes it as "
            "16-bit elements with a zero byte: cast to bfloat16 before, or turn pairs of bytes "
            "with .view(nl.bfloat16)"
        )


def _check_dtypes(me: str, out: Layout, left: Layout, right: Layout, is_transpose: bool) -> None:
    if is_transpose:
        if out.dtype != left.dtype:
            raise NkiValidationError(
                f"{me}: is_transpose moves bits: dst has dtype {out.dtype}, stationary "
                f"{left.dtype}; they must be the same"
            )
        check_transposed_dtype(me, left)
        return
    if (left.dtype in _WIDE) != (right.dtype in _WIDE):
        raise NkiValidationError(
            f"{me}: stationary is {left.dtype}, moving is {right.dtype}; float32/tfloat32 only "
            "goes with float32/tfloat32"
        )
    if out.dtype != "float32":
        raise NkiValidationError(f"{me}: dst has dtype {out.dtype}; allowed on trn2: float32")
