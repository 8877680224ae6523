"""What the elementwise instructions share: operand signatures, plans, operator rules."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..dtypes import INTEGERS
from ..errors import NkiValidationError
from ..ops import Op
from ..records import Engine
from ..rules.operands import check_column_dtype
from ..tensor import NkiTensor
from .enums import engine
from .exactness import EXACT, check_immediate
from .operands import check_vector, is_tensor

_F32_ONLY: Final = frozenset({"float32"})


def signature(x: object) -> object:
    """What validation depends on: the layout of a tensor, else the type of the operand."""
    return x.v.layout if type(x) is NkiTensor else type(x)


class Elementwise:
    """A validated elementwise instruction: operators, reshapes, engine."""

    __slots__ = (
        "bitvec",
        "direct",
        "engine",
        "exact",
        "name",
        "ndim",
        "op0",
        "op1",
        "reshape",
        "rounded",
    )

    def __init__(
        self,
        dst: NkiTensor,
        data: NkiTensor,
        op0: Op,
        op1: Op | None,
        engine_name: Engine,
    ) -> None:
        layout = dst.v.layout
        self.op0 = op0.apply
        self.op1 = None if op1 is None else op1.apply
        self.bitvec = op0.kind == "bitvec"
        self.direct = layout.plain and not self.bitvec
        self.reshape = None if data.v.layout.shape == layout.shape else layout.shape
        self.ndim = layout.ndim
        self.engine = engine_name
        self.exact = False
        """Integer arithmetic without fp32."""
        self.rounded = False
        """32-bit integers through fp32."""
        self.name = op0.name if op1 is None else f"{op0.name},{op1.name}"

    def constant(self, value: Any, instruction: str, operand: str) -> np.float32:
        """An immediate as the engine takes it."""
        if not -EXACT <= value <= EXACT:
            check_immediate(value, instruction, operand)
        return np.float32(value)


def choose_engine(
    instruction: str, wanted: Any, allowed: tuple[engine, ...], default: Engine
) -> Engine:
    if not isinstance(wanted, engine) or wanted not in (*allowed, engine.unknown):
        raise NkiValidationError(
            f"{instruction}: engine {wanted}; allowed: "
            f"{', '.join(e.name for e in allowed)} or unknown"
        )
    if wanted is engine.unknown:
        return default
    return wanted.name  # type: ignore[return-value]  # `allowed` holds compute engines only


def check_bitvec(me: str, **tiles: Any) -> None:
    for operand, t in tiles.items():
        if is_tensor(t) and t.dtype not in INTEGERS:
            raise NkiValidationError(
                f"{me}: operand {operand} {t.name!r} has dtype {t.dtype}; bitvec operators take "
                "integer dtypes only (reinterpret with .view)"
            )
    widths = {t.v.layout.itemsize for t in tiles.values() if is_tensor(t)}
    if len(widths) > 1:
        raise NkiValidationError(
            f"{me}: bitvec operands have item sizes {sorted(widths)}; they must agree"
        )


def check_operand(
    me: str, operand: str, op: Op, value: Any, partitions: int, *, any_dtype: bool = False
) -> None:
    """A number or a [partitions, 1] tile: float32, with bitvec operators integers.

    `any_dtype`: of another dtype it breaks rule "vector_column" only.
    """
    if op.unary:
        if value is not None and (is_tensor(value) or value != 0):
            raise NkiValidationError(
                f"{me}: {operand} is {value!r}; unary nl.{op.name} takes None or 0"
            )
        return
    if is_tensor(value):
        dtypes = INTEGERS if op.kind == "bitvec" else _F32_ONLY
        check_vector(me, operand, value, partitions, None if any_dtype else dtypes)
        if any_dtype:
            check_column_dtype(me, operand, value)
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise NkiValidationError(
            f"{me}: {operand} is {value!r}; allowed: a number or a [{partitions}, 1] tile"
        )
    if op.kind == "bitvec" and not isinstance(value, (int, np.integer)):
        raise NkiValidationError(f"{me}: {operand} is {value!r}; bitvec operators take integers")
