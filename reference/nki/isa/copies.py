"""On-chip copies and fills: tensor_copy, memset, tensor_copy_predicated."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..dtypes import FLOATS, INTEGERS, NUMPY, Array, cast
from ..errors import NkiValidationError
from ..records import Engine
from ..regions import ON_CHIP, PSUM
from ..strict import Plans
from ..tensor import NkiTensor
from .elementwise import choose_engine, signature
from .enums import NkiInstruction, engine
from .execute import finish, fp32, operand_value, put, put_where, raw, target
from .gaps import computed_gaps, moved_gaps
from .legacy import hides_dtype, ignore_dtype
from .operands import (
    check_destination,
    check_free_dims,
    check_not_both_psum,
    check_same_size,
    check_tile,
    is_tensor,
)

_PREDICATES: Final = frozenset({"uint8", "uint16", "uint32"})
_copies: Plans[Any] = Plans()


@hides_dtype
def tensor_copy(
    dst: NkiTensor,
    src: NkiTensor,
    engine: engine = engine.unknown,
    name: str | None = None,
    dtype: Any = None,
) -> NkiInstruction:
    """Store dst = src on chip; bit exact for one dtype, through fp32 between dtypes."""
    me = "nisa.tensor_copy"
    key = (signature(dst), signature(src), engine)
    plan = _copies.get(key)
    if plan is None:
        plan = _copies.made(key, _plan_copy, me, dst, src, engine)
    if dtype is not None:
        ignore_dtype(me, dtype)
    chosen, same = plan
    if not src.v.known and (gaps := moved_gaps(me, dst, src, _as_it_is)):
        with gaps:
            return tensor_copy(dst, src, engine)
    values = raw(src, me, "src") if same else fp32(src, me, "src")
    shape = dst.v.layout.shape
    if values.shape != shape:
        values = values.reshape(shape)
    if same:
        np.copyto(target(dst, me).array, values)
    else:
        put(dst, values, me)
    return finish(chosen, "tensor_copy", (dst,), (src,))


def _as_it_is(values: Array) -> Array:
    return values


def _plan_copy(me: str, dst: Any, src: Any, wanted: engine) -> tuple[Engine, bool]:
    out, source = check_tile(me, "dst", dst), check_tile(me, "src", src)
    check_destination(me, dst)
    check_same_size(me, "src", source, out)
    chosen = choose_engine(me, wanted, (engine.vector, engine.scalar, engine.gpsimd), "vector")
    if chosen == "gpsimd" and PSUM in (out.region, source.region):
        raise NkiValidationError(
            f"{me}: GpSimd cannot access PSUM; use the vector or scalar engine"
        )
    return chosen, out.dtype == source.dtype


def memset(
    dst: NkiTensor, value: Any, engine: engine = engine.unknown, name: str | None = None
) -> NkiInstruction:
    """Fill dst with a constant; integer tiles take integers."""
    me = "nisa.memset"
    clears = isinstance(value, (int, float, np.number)) and not value
    key = (signature(dst), type(value), clears, engine, "memset")
    chosen = _copies.get(key)
    if chosen is None:
        chosen = _copies.made(key, _plan_memset, me, dst, value, engine)
    view = target(dst, me)
    dtype = view.layout.dtype
    if dtype in INTEGERS or dtype == "int64":
        limits = np.iinfo(NUMPY[dtype]) if dtype != "bool_" else None
        if limits is not None and not limits.min <= int(value) <= limits.max:
            raise NkiValidationError(
                f"{me}: value {value} for dtype {dtype}; allowed: {limits.min}..{limits.max}"
            )
        view.array.fill(int(value))
    else:
        view.array[...] = cast(np.asarray(operand_value(value, 2, me, "value")), dtype)
    return finish(chosen, "memset", (dst,), ())


def _plan_memset(me: str, dst: Any, value: Any, wanted: engine) -> Engine:
    out = check_tile(me, "dst", dst, dtypes=NUMPY.keys())
    check_free_dims(me, 4, dst=out)
    check_destination(me, dst)
    if not isinstance(value, (bool, int, float, np.number)):
        raise NkiValidationError(f"{me}: value is {value!r}; allowed: a number")
    # 0.0 has the bits of the integer 0, and AWS's kernels clear integer tiles with it.
    if out.dtype not in FLOATS and not isinstance(value, (bool, int, np.integer)) and value:
        raise NkiValidationError(
            f"{me}: value {value!r} for a tile of dtype {out.dtype}; integer tiles take integers"
        )
    chosen = choose_engine(me, wanted, (engine.vector, engine.gpsimd), "vector")
    if chosen == "gpsimd" and out.region is PSUM:
        raise NkiValidationError(f"{me}: GpSimd cannot access PSUM; use the vector engine")
    return chosen


def tensor_copy_predicated(
    dst: NkiTensor,
    src: Any,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> NkiInstruction:
    """Store dst = src where the predicate is nonzero (reverse_pred: zero), nothing elsewhere."""
    me = "nisa.tensor_copy_predicated"
    key = (signature(dst), signature(src), type(src), signature(predicate), "predicated")
    if key not in _copies:
        _copies.made(key, _plan_predicated, me, dst, src, predicate)
    if reverse_pred and is_tensor(src):
        raise NkiValidationError(
            f"{me}: reverse_pred=True with a tile as src; allowed with a scalar src only: invert "
            "the predicate instead"
        )
    if not predicate.v.known and (gaps := computed_gaps(me, dst, predicate=predicate)):
        with gaps:
            return tensor_copy_predicated(dst, src, predicate, reverse_pred)
    shape = dst.v.layout.shape
    where = raw(predicate, me, "predicate").reshape(shape) != 0
    if reverse_pred:
        where = ~where
    reads: tuple[NkiTensor, ...] = (predicate,)
    values: Any
    if is_tensor(src):
        values = raw(src, me, "src", where).reshape(shape)
        reads = (src, predicate)
    else:
        values = cast(np.asarray(operand_value(src, 2, me, "src")), dst.dtype)
    put_where(dst, np.broadcast_to(values, shape), where, me)
    return finish("vector", "tensor_copy_predicated", (dst,), reads)


def _plan_predicated(me: str, dst: Any, src: Any, predicate: Any) -> bool:
    out = check_tile(me, "dst", dst)
    mask = check_tile(me, "predicate", predicate, dtypes=_PREDICATES)
    check_destination(me, dst)
    check_same_size(me, "predicate", mask, out)
    check_free_dims(me, dst=out, predicate=mask)
    if is_tensor(src):
        source = check_tile(me, "src", src)
        check_free_dims(me, src=source)
        check_same_size(me, "src", source, out)
        check_not_both_psum(me, src=source, predicate=mask)
        if source.dtype != out.dtype:
            raise NkiValidationError(
                f"{me}: src has dtype {source.dtype}, dst {out.dtype}; they must be the same"
            )
    elif not isinstance(src, (int, float, np.number)):
        raise NkiValidationError(f"{me}: src is {src!r}; allowed: a number or a tile")
    elif isinstance(src, (float, np.floating)) is not (out.dtype in FLOATS):
        kind = "float" if out.dtype in FLOATS else "int"
        raise NkiValidationError(
            f"{me}: src is {src!r} for a dst of dtype {out.dtype}; a scalar must be a {kind}"
        )
    return True


def store_into(dst: NkiTensor, value: Any) -> None:
    """`tensor[...] = value`: a DMA when either side is in HBM, else an on-chip copy or fill."""
    from .dma import dma_copy

    if not is_tensor(value):
        memset(dst, float(value) if dst.dtype in FLOATS else value)
    elif dst.buffer in ON_CHIP and value.buffer in ON_CHIP:
        tensor_copy(dst, value)
    else:
        dma_copy(dst, value)


NkiTensor.assign = staticmethod(store_into)
