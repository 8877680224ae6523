"""Tensor Engine: nc_matmul and nc_transpose."""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from .. import trace
from ..core import current
from ..dtypes import Array
from ..errors import NkiValidationError
from ..rules.operands import check_matmul_operands
from ..rules.psum_groups import check_inferred_group
from ..strict import Plans, violation
from ..tensor import NkiTensor
from .elementwise import signature
from .enums import NkiInstruction, matmul_perf_mode
from .execute import account, fp32, handed_over, put, raw, use_psum, view_of
from .gaps import moved_gaps
from .matmul_plan import MatmulPlan, check_position, check_tensor_engine_write, plan_matmul

_plans: Plans[MatmulPlan] = Plans()


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
        plan = _plans.made(
            key, plan_matmul, me, dst, stationary, moving, is_transpose, tile_position, tile_size,
            perf_mode,
        )  # fmt: skip
    if tile_position:
        row, column = tile_position
        check_position(me, "stationary", stationary, row, "row")
        check_position(me, "moving", moving, row, "row")
        check_position(me, "dst", dst, column, "column")
    if is_transpose:
        _check_identity(me, raw(moving, me, "moving").reshape(plan.k, plan.n))
        turned = partial(_turned, plan.k, plan.m)
        if not stationary.v.known and (gaps := moved_gaps(me, dst, stationary, turned)):
            with gaps:
                return nc_matmul(
                    dst,
                    stationary,
                    moving,
                    is_transpose=True,
                    tile_position=tile_position,
                    tile_size=tile_size,
                )
        values = turned(raw(stationary, me, "stationary"))
        check_tensor_engine_write(me, dst.storage, view_of(dst, me, "dst"))
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
    use_psum(current(), "nc_matmul", dst, reads=False)
    check_matmul_operands("nc_matmul", dst, stationary, moving)
    recorder = trace.active
    if recorder is not None:
        recorder.matmul(
            current().index,
            dst.access,
            stationary.access,
            moving.access,
            perf_mode.value,
            is_transpose,
            (int(tile_position[0]), int(tile_position[1])) if tile_position else (0, 0),
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
    check_tensor_engine_write(me, storage, view)
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
            storage.poison(view)
            summed = True
        trips = current().trips
        if accumulate is None:
            if trips is not None:
                trips.inferred(summed if isinstance(summed, bool) else None)
            check_inferred_group(me, storage, view, summed)
    two_d = out.ndim == 2 and right.shape[1] > 1
    shape = view.layout.shape
    if summed is False and two_d:
        np.matmul(left, right, out=out)
    else:
        product = _product(left, right).reshape(shape)
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
    if summed is False:
        psum.chains.begin(view)
    else:
        psum.chains.add(view, me, storage.name)


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


def _product(left: Array, right: Array) -> Array:
    """The product; a single column is taken with a second one.

    BLAS adds it up in another order alone, and its bits must not depend on those beside it.
    """
    one = right.shape[1] == 1
    product: Array = np.matmul(left, right[:, [0, 0]] if one else right)
    return product[:, :1] if one else product
