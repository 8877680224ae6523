"""Rules on the operands of one compute instruction.

"dynamic_operand", "operand_partitions" and "vector_column".
"""

from __future__ import annotations

from typing import Final

from ..regions import SBUF
from ..strict import violation
from ..tensor import NkiTensor

WIDE_FLOATS: Final = frozenset({"float32", "tfloat32"})


def check_dynamic_operands(
    opcode: str, writes: tuple[NkiTensor, ...], reads: tuple[NkiTensor, ...]
) -> None:
    """Engines access fixed addresses; DMA reaches those that are known at run time only."""
    for t in (*writes, *reads):
        if t.dynamic is not None:
            violation(
                "dynamic_operand",
                f"nisa.{opcode}: operand {t.name!r} in {t.buffer.value} has a run-time offset; "
                "move the part to a tile of its own by dma_copy first",
            )
            return


def check_matmul_operands(
    opcode: str, dst: NkiTensor, stationary: NkiTensor, moving: NkiTensor
) -> None:
    """Both rules for a matmul, and "matmul_dtypes", which documents state for sums only."""
    if not (dst.dynamic is stationary.dynamic is moving.dynamic is None):
        check_dynamic_operands(opcode, (dst,), (stationary, moving))
    left, right = stationary.v.layout, moving.v.layout
    if left.start != right.start:
        check_same_partitions(opcode, (stationary, moving))
    if left.dtype != right.dtype and {left.dtype, right.dtype} & WIDE_FLOATS:
        violation(
            "matmul_dtypes",
            f"nisa.{opcode}: stationary {stationary.name!r} is {left.dtype}, moving "
            f"{moving.name!r} is {right.dtype}; allowed: float32 with float32 only, also in a "
            "transpose",
        )


def check_same_partitions(opcode: str, reads: tuple[NkiTensor, ...]) -> None:
    """The tiles that an instruction reads from SBUF start at one partition.

    AWS's kernels for token generation add PSUM of partition 32 to SBUF of partition 0.
    """
    starts = [(t.name, t.v.layout.start) for t in reads if t.buffer is SBUF]
    if len({start for _, start in starts}) > 1:
        named = ", ".join(f"{name!r} at {start}" for name, start in starts)
        violation(
            "operand_partitions",
            f"nisa.{opcode}: its inputs in SBUF start at different partitions ({named}); allowed: "
            "one start for all, as each partition has its own lane: move one of them first",
        )


def check_column_dtype(me: str, operand: str, column: NkiTensor) -> None:
    """A [P, 1] operand of scalar_tensor_tensor, tensor_tensor_scan, select_reduce is float32."""
    if column.dtype != "float32":
        violation(
            "vector_column",
            f"{me}: operand {operand} {column.name!r} has dtype {column.dtype}; allowed: float32, "
            "copy it with tensor_copy first",
        )
