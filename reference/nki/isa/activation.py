"""Scalar Engine: activation functions with scale, bias and a running sum."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..activations import Activation, activation_of
from ..core import current
from ..dtypes import INTEGERS, NUMPY, Array
from ..errors import NkiValidationError
from ..ops import NAMES
from ..rules.reductions import check_square_sum
from ..strict import Plans, level, violation
from ..tensor import NkiTensor
from .elementwise import signature
from .enums import NkiInstruction, engine, reduce_cmd
from .exactness import check_exact_result, check_exact_sums
from .execute import finish, fp32, operand_value, put, target
from .gaps import computed_gaps, is_known, row_gaps
from .operands import check_destination, check_same_size, check_tile, check_vector, is_tensor
from .reduce import check_command

_F32: Final = frozenset({"float32"})
_BIAS: Final = frozenset(NUMPY) - {"tfloat32"}
_plans: Plans[Activation] = Plans()


def activation(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: reduce_cmd = reduce_cmd.idle,
    engine: engine = engine.scalar,
    name: str | None = None,
) -> NkiInstruction:
    """Store dst = op(data * scale + bias), and row sums of the result before its cast.

    The Scalar Engine is the only one on trn2 (GpSimd from trn3 on).
    """
    if engine is not _SCALAR:
        raise NkiValidationError(
            f"nisa.activation: engine {engine}; allowed on trn2: scalar (GpSimd from trn3 on)"
        )
    return _activation("activation", dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)


def activation_reduce(
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    reduce_op: Any,
    reduce_res: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    name: str | None = None,
) -> NkiInstruction:
    """`activation` with reduce_cmd.reset_reduce and a read-out into reduce_res; deprecated."""
    violation(
        "deprecated",
        "nisa.activation_reduce is kept for compatibility only; use nisa.activation with "
        "reduce_op, reduce_res and reduce_cmd",
    )
    return _activation(
        "activation_reduce",
        dst,
        op,
        data,
        bias,
        scale,
        reduce_op,
        reduce_res,
        reduce_cmd.reset_reduce,
    )


def _activation(
    opcode: str,
    dst: NkiTensor,
    op: Any,
    data: NkiTensor,
    bias: Any,
    scale: Any,
    reduce_op: Any,
    reduce_res: NkiTensor | None,
    command: reduce_cmd,
) -> NkiInstruction:
    me = f"nisa.{opcode}"
    key = (
        signature(dst),
        signature(data),
        op,
        signature(bias),
        signature(scale),
        reduce_op,
        signature(reduce_res),
        command,
    )
    function = _plans.get(key)
    if function is None:
        function = _plans.made(
            key, _plan, me, dst, op, data, bias, scale, reduce_op, reduce_res, command
        )
    idle = command is _IDLE and reduce_res is None
    if not idle and function.name == "square":
        check_square_sum(me)
    if not (data.v.known and is_known(bias) and is_known(scale)):
        operands = {"data": data, "bias": bias, "scale": scale}
        gaps = (
            computed_gaps(me, dst, **operands)
            if idle
            else row_gaps(me, (dst, reduce_res), **operands)
        )
        if gaps is not None:
            with gaps:
                return _activation(
                    opcode, dst, op, data, bias, scale, reduce_op, reduce_res, command
                )
    layout = dst.v.layout
    x = fp32(data, me, "data")
    if x.shape != layout.shape:
        x = x.reshape(layout.shape)
    reads: tuple[NkiTensor, ...] = (data,)
    factor = operand_value(scale, layout.ndim, me, "scale")
    if type(scale) is NkiTensor:
        reads = (data, scale)
    term: Any = None
    if bias is not None:
        term = operand_value(bias, layout.ndim, me, "bias")
        if type(bias) is NkiTensor:
            reads = (*reads, bias)
            if bias.storage.buffer is dst.storage.buffer:
                term = term.copy()
    discards = 0 in layout.strides
    plain = layout.plain and not discards
    out = target(dst, me).array if plain else np.empty(layout.shape, np.float32)
    scaled = x
    if type(scale) is NkiTensor or factor != 1:
        scaled = np.multiply(x, factor, out=out)
    if term is not None:
        scaled = np.add(scaled, term, out=out)
    if function.limited:
        _check_range(me, function, scaled)
    out = function.apply(scaled, out=out)
    writes: tuple[NkiTensor, ...] = (dst,)
    sums = None
    integers = data.v.layout.dtype in INTEGERS and function.name in _KEEP_INTEGERS
    if not idle:
        if integers:
            flat = out.reshape(layout.partitions, -1)
            check_exact_sums(flat, data.dtype, "float32", "add", me)
        sums = _accumulate(me, out, layout.start, layout.partitions, command)
    if not plain:
        if integers:
            _check_exact(me, function, out, layout.dtype, x, factor, term)
        put(dst, out, me)
    if reduce_res is not None:
        assert sums is not None
        put(reduce_res, sums.reshape(reduce_res.v.layout.shape), me)
        writes = (dst, reduce_res)
    return finish("scalar", opcode, writes, reads, function.name)


_IDLE: Final = reduce_cmd.idle
_SCALAR: Final = engine.scalar
_KEEP_INTEGERS: Final = frozenset({"copy", "square", "relu", "abs"})


def _check_exact(
    me: str, function: Activation, out: Array, dtype: str, x: Array, factor: Any, term: Any
) -> None:
    """Compare with what integers give without rounding to fp32 between the steps."""

    def in_fp64() -> Array:
        scaled = x.astype(np.float64) * np.float64(factor)
        if term is not None:
            scaled = scaled + np.float64(term)
        return np.asarray(function.apply(scaled), np.float64)

    check_exact_result(out, dtype, me, in_fp64)


def _accumulate(me: str, out: Array, start: int, partitions: int, command: reduce_cmd) -> Array:
    """Run the reduce command and return the registers of these partitions."""
    registers = current().scalar_sum
    rows = slice(start, start + partitions)
    if command is reduce_cmd.idle:
        return registers.read(rows, me)
    sums = np.zeros(partitions, np.float32)
    if command is not reduce_cmd.reset:
        sums = np.add.reduce(out.reshape(partitions, -1), axis=1)
    if command is reduce_cmd.reduce:
        sums = registers.read(rows, me) + sums
    registers.store(rows, sums)
    return sums


def _check_range(me: str, function: Activation, x: Array) -> None:
    """Rule "activation_range": inputs outside the documented valid range; NaN passes."""
    if level("activation_range") == "off" or not x.size:
        return
    size = np.abs(x) if function.symmetric else x
    outside = (size < function.low) | (size > function.high)
    if outside.any():
        sign = "+-" if function.symmetric else ""
        violation(
            "activation_range",
            f"{me}: op nl.{function.name} gets {float(x[outside].reshape(-1)[0])!r} after scale "
            f"and bias; valid inputs are {sign}[{function.low:g}, {function.high:g}]; clamp the "
            "input or use a Vector Engine instruction",
        )


def _plan(
    me: str,
    dst: Any,
    op: Any,
    data: Any,
    bias: Any,
    scale: Any,
    reduce_op: Any,
    reduce_res: Any,
    command: Any,
) -> Activation:
    function = activation_of(me, op)
    out, source = check_tile(me, "dst", dst), check_tile(me, "data", data)
    if command is reduce_cmd.idle:
        # With a reduction, kernels discard the elements in a tile whose free step is 0.
        check_destination(me, dst)
    check_same_size(me, "data", source, out)
    for label, value, dtypes in (("scale", scale, _F32), ("bias", bias, _BIAS)):
        if is_tensor(value):
            check_vector(me, label, value, source.partitions, dtypes)
        elif value is not None and not isinstance(value, (int, float, np.number)):
            raise NkiValidationError(
                f"{me}: {label} is {value!r}; allowed: a number or a [{source.partitions}, 1] tile"
            )
    if scale is None:
        raise NkiValidationError(f"{me}: scale is None; allowed: a number or a tile")
    check_command(me, command, None)
    if command in (reduce_cmd.reduce, reduce_cmd.reset_reduce) and NAMES.get(reduce_op) != "add":
        raise NkiValidationError(
            f"{me}: reduce_op is {getattr(reduce_op, '__name__', reduce_op)!r}; allowed: nl.add"
        )
    if reduce_res is not None:
        check_vector(me, "reduce_res", reduce_res, source.partitions)
    return function
