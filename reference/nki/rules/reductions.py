"""Rules "integer_reduce" and "square_sum": reductions that the compiler refuses."""

from __future__ import annotations

from ..dtypes import INTEGERS
from ..strict import violation
from ..tensor import NkiTensor


def check_reduced_dtypes(me: str, **operands: NkiTensor | None) -> None:
    """tensor_scalar_reduce takes and gives floats."""
    for operand, t in operands.items():
        if t is not None and t.dtype in INTEGERS:
            violation(
                "integer_reduce",
                f"{me}: operand {operand} {t.name!r} has dtype {t.dtype}; allowed: float dtypes, "
                "cast with tensor_copy before and after",
            )
            return


def check_square_sum(me: str) -> None:
    """A sum of squares in one instruction of the Scalar Engine."""
    violation(
        "square_sum",
        f"{me}: op nl.square with a reduction; use nisa.activation and nisa.tensor_reduce, which "
        "always compile",
    )
