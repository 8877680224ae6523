"""Collectives with equal parts: all_reduce, all_gather, reduce_scatter, all_to_all."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import INTEGERS, Array, cast
from ..errors import NkiValidationError
from ..ops import op_of
from ..tensor import NkiTensor
from .members import (
    Member,
    ReplicaGroup,
    check_no_priority,
    check_tensors,
    join,
    run,
    write,
)

_REDUCTIONS = {"add": np.add, "minimum": np.minimum, "maximum": np.maximum}


def reduction(member: Member, op: Any, dtype: str) -> Any:
    """Return the function that folds the arrays of all ranks, in group order.

    Floats are summed in float32 and cast once; integers are exact and saturate.
    """
    name = op_of(member.instruction, "op", op).name
    if name not in _REDUCTIONS:
        raise NkiValidationError(
            f"{member.instruction}: op nl.{name}; allowed: nl.add, nl.minimum, nl.maximum"
        )
    fold = _REDUCTIONS[name]
    wide = np.int64 if dtype in INTEGERS else np.float32

    def reduce(arrays: list[Array]) -> Array:
        total = arrays[0].astype(wide)
        for array in arrays[1:]:
            total = fold(total, array.astype(wide))
        return cast(total, dtype)

    return reduce


def all_reduce(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Dsts of every rank = op over the srcs of all ranks, elementwise."""
    member = join("ncc.all_reduce", replica_group)
    check_no_priority(member.instruction, priority)
    check_tensors(member.instruction, srcs, dsts, on_chip=True)
    reduce = reduction(member, op, srcs[0].dtype)

    def deliver(values: list[list[Array]]) -> None:
        for index, dst in enumerate(dsts):
            write(member, dst, reduce([arrays[index] for arrays in values]))

    run(member, srcs, dsts, deliver)


def all_gather(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Dsts = the srcs of all ranks, concatenated along collective_dim in group order."""
    member = join("ncc.all_gather", replica_group)
    check_no_priority(member.instruction, priority)
    check_tensors(member.instruction, srcs, dsts, on_chip=True)
    _check_dim(member, collective_dim, (0, 1) if srcs[0].v.layout.on_chip else (0,))

    def deliver(values: list[list[Array]]) -> None:
        for index, dst in enumerate(dsts):
            parts = [arrays[index] for arrays in values]
            write(member, dst, np.concatenate(parts, axis=collective_dim))

    run(member, srcs, dsts, deliver)


def reduce_scatter(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    op: Any,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Dsts of the i-th rank = the i-th part, along dim 0, of op over the srcs of all ranks."""
    member = join("ncc.reduce_scatter", replica_group)
    check_no_priority(member.instruction, priority)
    check_tensors(member.instruction, srcs, dsts, on_chip=True)
    _check_dim(member, collective_dim, (0,))
    reduce = reduction(member, op, srcs[0].dtype)
    _check_parts(member, srcs)

    def deliver(values: list[list[Array]]) -> None:
        for index, dst in enumerate(dsts):
            parts = [_part(member, arrays[index], member.position) for arrays in values]
            write(member, dst, reduce(parts))

    run(member, srcs, dsts, deliver)


def all_to_all(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    collective_dim: int,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Dsts of the i-th rank = the i-th parts, along dim 0, of the srcs of all ranks."""
    member = join("ncc.all_to_all", replica_group)
    check_no_priority(member.instruction, priority)
    check_tensors(member.instruction, srcs, dsts)
    _check_dim(member, collective_dim, (0,))
    _check_parts(member, srcs)

    def deliver(values: list[list[Array]]) -> None:
        for index, dst in enumerate(dsts):
            parts = [_part(member, arrays[index], member.position) for arrays in values]
            write(member, dst, np.concatenate(parts))

    run(member, srcs, dsts, deliver)


def _check_dim(member: Member, dim: Any, allowed: tuple[int, ...]) -> None:
    if dim not in allowed:
        raise NkiValidationError(
            f"{member.instruction}: collective_dim {dim!r}; allowed: {', '.join(map(str, allowed))}"
        )


def _check_parts(member: Member, srcs: list[NkiTensor]) -> None:
    for source in srcs:
        if source.shape[0] % member.size:
            raise NkiValidationError(
                f"{member.instruction}: dim 0 of src {source.shape} must be a multiple of the "
                f"{member.size} ranks of the group"
            )


def _part(member: Member, array: Array, position: int) -> Array:
    rows = array.shape[0] // member.size
    return array[position * rows : (position + 1) * rows]
