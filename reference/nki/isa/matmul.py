"""Tensor Engine: nc_matmul and nc_transpose."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Final

import numpy as np

from .. import trace
from ..core import current
from ..dtypes import FP8, Array
from ..errors import NkiValidationError
from ..layout import Layout
from ..regions import PSUM_BANK_BYTES
from ..storage import Storage, View
from ..strict import violation
from ..tensor import NkiTensor
from .elementwise import signature
from .enums import NkiInstruction, matmul_perf_mode
from .execute import account, fp32, handed_over, put, raw, view_of
from .movement import move_written_part
from .operands import PSUM_ONLY, SBUF_ONLY, check_destination, check_tile

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


_plans: dict[object, MatmulPlan] = {}


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: matmul_perf_mode = matmul_perf_mode.none,
    name: str | None = None,
) -> NkiInstruction:
    """dst[M, N] (+)= stationary[K, M].T @ moving[K, N] with float32 sums in PSUM.

    accumulate False overwrites, True adds to an open group, None adds where an earlier matmul
    wrote and overwrites elsewhere.
    """
    me = "nisa.nc_matmul"
    key = (
        signature(dst),
        signature(stationary),
        signature(moving),
        is_transpose,
        tuple(tile_position),
        tuple(tile_size),
        perf_mode,
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(me, dst, stationary, moving, is_transpose, tile_position, tile_size, perf_mode)
        _plans[key] = plan
    if is_transpose:
        _check_identity(me, raw(moving, me, "moving").reshape(plan.k, plan.n))
        turned = partial(_turned, plan.k, plan.m)
        if stationary.storage.written or not move_written_part(dst, stationary, me, turned):
            values = turned(raw(stationary, me, "stationary"))
            put(dst, values.reshape(dst.v.layout.shape), me)
    else:
        left = fp32(stationary, me, "stationary")
        right = fp32(moving, me, "moving")
        if plan.double_row:
            left = left.reshape(plan.k, 2, plan.m).transpose(1, 0, 2).reshape(-1, plan.m)
            right = right.reshape(plan.k, 2, plan.n).transpose(1, 0, 2).reshape(-1, plan.n)
        else:
            left = left.reshape(plan.k, plan.m)
            right = right.reshape(plan.k, plan.n)
        _accumulate(me, dst, left.T, right, accumulate)
    number = account((dst,), (stationary, moving))
    recorder = trace.active
    if recorder is not None:
        recorder.matmul(
            current().index,
            dst.access,
            stationary.access,
            moving.access,
            perf_mode.value,
            is_transpose,
            plan.tile_size,
        )
    return handed_over(number)


def _accumulate(
    me: str, dst: NkiTensor, left: Array, right: Array, accumulate: bool | None
) -> None:
    """Write or add the product, by the state of the PSUM elements."""
    view = view_of(dst, me, "dst")
    storage = dst.storage
    if storage.watch is not None:
        storage.watch.before_write(storage, view, me)
    _check_bank(me, storage, view)
    psum = storage.psum
    assert psum is not None
    out = view.array
    summed: bool | Array = False
    if accumulate is not False:
        summed = psum.summed(view, storage)
        if accumulate and summed is not True:
            violation(
                "psum_accumulation",
                f"{me}: accumulate=True on dst {storage.name!r} of shape {view.layout.shape}, but "
                + ("part of it was" if summed is not False else "it was")
                + " not written by an earlier matmul of the group; start the group with "
                "accumulate=False (or leave accumulate=None)",
            )
            storage.check_written(view, me, "dst")
            summed = True
    two_d = out.ndim == 2
    shape = view.layout.shape
    if summed is False and two_d:
        np.matmul(left, right, out=out)
    else:
        product = np.matmul(left, right).reshape(shape)
        if summed is True:
            np.add(out, product, out=out)
        elif summed is False:
            out[...] = product
        else:
            np.add(out, product, out=product, where=summed)
            out[...] = product
    storage.version += 1
    if not view.known:
        storage.note_write(view)
    psum.add_group(view, storage)


def _turned(rows: int, columns: int, values: Array) -> Array:
    return values.reshape(rows, columns).T


def _check_identity(me: str, moving: Array) -> None:
    """Transpose mode moves the stationary data through an identity."""
    if moving.shape[0] != moving.shape[1] or not np.array_equal(moving, _identity(len(moving))):
        raise NkiValidationError(
            f"{me}: is_transpose=True with a moving operand of shape {moving.shape} that is no "
            "identity matrix; pass one (nl.shared_identity_matrix) with a row for each partition"
        )


@cache
def _identity(n: int) -> Array:
    return np.eye(n, dtype=np.float32)


def _check_bank(me: str, storage: Storage, view: View) -> None:
    """A matmul writes inside one bank. Not part of the plan: it depends on the address."""
    layout = view.layout
    first = (storage.first_byte + layout.free_byte(view.offset)) % PSUM_BANK_BYTES
    if first + layout.span > PSUM_BANK_BYTES:
        raise NkiValidationError(
            f"{me}: dst {storage.name!r} spans bytes {first}..{first + layout.span - 1} from the "
            f"start of its PSUM bank; a matmul writes one bank of {PSUM_BANK_BYTES} bytes"
        )


def _plan(
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


def _check_dtypes(me: str, out: Layout, left: Layout, right: Layout, is_transpose: bool) -> None:
    if is_transpose:
        if out.dtype != left.dtype:
            raise NkiValidationError(
                f"{me}: is_transpose moves bits: dst has dtype {out.dtype}, stationary "
                f"{left.dtype}; they must be the same"
            )
        return
    if (left.dtype in _WIDE) != (right.dtype in _WIDE):
        raise NkiValidationError(
            f"{me}: stationary is {left.dtype}, moving is {right.dtype}; float32/tfloat32 only "
            "goes with float32/tfloat32"
        )
    if out.dtype != "float32":
        raise NkiValidationError(f"{me}: dst has dtype {out.dtype}; allowed on trn2: float32")
