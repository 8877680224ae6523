"""Collectives whose sizes are known at run time: all_gather_v and all_to_all_v.

The metadata tensor has one column per rank of the group. Rows: send counts, send displacements,
received counts (written unless `recv_counts_known`), all in elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core import current
from ..dtypes import Array
from ..errors import NkiValidationError
from ..isa.execute import put, raw
from ..tensor import NkiTensor
from .members import (
    Member,
    ReplicaGroup,
    check_no_priority,
    check_tensors,
    join,
    run,
)

_ROWS = 3
_GATHER_RANKS = 4


def all_gather_v(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank gets the chunk that each rank names in column 0, in equal slots of dst."""
    member = join("ncc.all_gather_v", replica_group)
    if member.size != _GATHER_RANKS:
        raise NkiValidationError(
            f"{member.instruction}: {member.size} ranks in the group; allowed: {_GATHER_RANKS}"
        )
    if current().num_cores != 2:
        raise NkiValidationError(f"{member.instruction}: needs LNC=2; launch kernel[2](...)")
    if has_rdispls:
        raise NkiValidationError(f"{member.instruction}: has_rdispls=True is not supported")
    _run(member, srcs, dsts, metadata_tensor, recv_counts_known, priority, same_for_all=True)


def all_to_all_v(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    replica_group: ReplicaGroup,
    metadata_tensor: NkiTensor,
    recv_counts_known: bool = False,
    has_rdispls: bool = False,
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Every rank sends to each rank the chunk that the metadata names, into equal slots of dst."""
    member = join("ncc.all_to_all_v", replica_group)
    if has_rdispls:
        raise NkiValidationError(f"{member.instruction}: has_rdispls=True exists on trn3 only")
    _run(member, srcs, dsts, metadata_tensor, recv_counts_known, priority, same_for_all=False)


def _run(
    member: Member,
    srcs: Any,
    dsts: Any,
    metadata: Any,
    recv_counts_known: bool,
    priority: Any,
    *,
    same_for_all: bool,
) -> None:
    me = member.instruction
    check_no_priority(me, priority)
    check_tensors(me, srcs, dsts, coalesced=False)
    _check_metadata(member, metadata)
    dst = dsts[0]
    slot = dst.size // member.size

    def deliver(values: list[list[Array]]) -> None:
        column = 0 if same_for_all else member.position
        out = dst.v.array.reshape(-1).copy()
        counts = raw_metadata(metadata, me, member.size)
        for position, (source, table) in enumerate(values):
            chunk = _chunk(me, source, table.reshape(_ROWS, member.size)[:2, column])
            if chunk.size > slot:
                raise NkiValidationError(
                    f"{me}: {chunk.size} elements from rank {member.ranks[position]} for a slot "
                    f"of {slot} (dst has {dst.size} elements for {member.size} ranks)"
                )
            out[position * slot : position * slot + chunk.size] = chunk
            counts[2, position] = chunk.size
        put(dst, out.reshape(dst.shape), me)
        if not recv_counts_known:
            put(metadata, counts.reshape(metadata.shape), me)

    run(member, srcs, dsts, deliver, others=(metadata,))


def raw_metadata(metadata: NkiTensor, instruction: str, size: int) -> Array:
    """Return a copy of the metadata as [rows, ranks]."""
    return raw(metadata, instruction, "metadata_tensor").reshape(_ROWS, size).copy()


def _check_metadata(member: Member, metadata: Any) -> None:
    me = member.instruction
    shape = (_ROWS, member.size)
    if not isinstance(metadata, NkiTensor) or metadata.dtype != "uint32":
        raise NkiValidationError(f"{me}: metadata_tensor must be a uint32 tensor")
    expected = (1, *shape) if metadata.v.layout.on_chip else shape
    if metadata.shape != expected:
        raise NkiValidationError(
            f"{me}: metadata_tensor has shape {metadata.shape}; allowed: {expected}"
        )


def _chunk(instruction: str, source: Array, row: Array) -> Array:
    count, start = (int(value) for value in row)
    flat = np.ascontiguousarray(source).reshape(-1)
    if start + count > flat.size:
        raise NkiValidationError(
            f"{instruction}: chunk {start}..{start + count} of a src with {flat.size} elements"
        )
    return flat[start : start + count]
