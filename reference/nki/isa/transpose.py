"""nc_transpose: partition and free axis exchanged, on the Tensor or the Vector Engine."""

from __future__ import annotations

from typing import Any

from ..dtypes import Array
from ..errors import NkiValidationError
from ..records import Engine
from ..regions import PSUM, SBUF
from ..strict import Plans
from ..tensor import NkiTensor
from .elementwise import signature
from .enums import NkiInstruction, engine
from .execute import finish, put, raw, view_of
from .gaps import moved_gaps
from .matmul_plan import MAX_ROWS, check_tensor_engine_write, check_transposed_dtype
from .operands import check_destination, check_tile

MAX_VECTOR = 32
"""Rows and columns of a Vector Engine transpose."""

_transposes: Plans[Engine] = Plans()


def nc_transpose(
    dst: NkiTensor, data: NkiTensor, engine: engine = engine.unknown, name: str | None = None
) -> NkiInstruction:
    """dst[F, P] = data[P, F].T, bit exact: Tensor Engine SBUF -> PSUM up to 128 x 128, Vector
    Engine up to 32 x 32.
    """
    me = "nisa.nc_transpose"
    key = (signature(dst), signature(data), engine)
    chosen = _transposes.get(key)
    if chosen is None:
        chosen = _transposes.made(key, _plan_transpose, me, dst, data, engine)
    if not data.v.known and (gaps := moved_gaps(me, dst, data, _turned)):
        with gaps:
            return nc_transpose(dst, data, engine)
    if chosen == "tensor":
        check_tensor_engine_write(me, dst.storage, view_of(dst, me, "dst"))
    put(dst, _turned(raw(data, me, "data")).reshape(dst.v.layout.shape), me)
    return finish(chosen, "nc_transpose", (dst,), (data,))


def _turned(values: Array) -> Array:
    return values.reshape(len(values), -1).T


def _plan_transpose(me: str, dst: Any, data: Any, wanted: engine) -> Engine:
    out, source = check_tile(me, "dst", dst), check_tile(me, "data", data)
    check_destination(me, dst)
    if out.dtype != source.dtype:
        raise NkiValidationError(
            f"{me}: dst has dtype {out.dtype}, data {source.dtype}; they must be the same"
        )
    if (out.partitions, out.free) != (source.free, source.partitions):
        raise NkiValidationError(
            f"{me}: dst has shape {out.shape}; needed [{source.free}, {source.partitions}]"
        )
    if wanted is engine.unknown:
        on_pe = out.region is PSUM and source.region is SBUF
        wanted = engine.tensor if on_pe else engine.vector
    if wanted is engine.tensor:
        if source.region is not SBUF or out.region is not PSUM:
            raise NkiValidationError(
                f"{me}: on the Tensor Engine data must be in SBUF and dst in PSUM; they are in "
                f"{source.region.value} and {out.region.value}"
            )
        check_transposed_dtype(me, source)
        limit = MAX_ROWS
    elif wanted is engine.vector:
        limit = MAX_VECTOR
    else:
        raise NkiValidationError(f"{me}: engine {wanted}; allowed: tensor, vector, unknown")
    if source.partitions > limit or source.free > limit:
        raise NkiValidationError(
            f"{me}: operand data is [{source.partitions}, {source.free}]; limit "
            f"[{limit}, {limit}] on the {wanted.name} engine"
        )
    return "tensor" if wanted is engine.tensor else "vector"
