"""Collectives whose sizes are known at run time: all_gather_v and all_to_all_v, also in two steps.

The metadata tensor has one column per rank of the group. Rows: send counts, send displacements,
received counts (written unless `recv_counts_known`), all in elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core import current
from ..dtypes import Array
from ..errors import NkiValidationError
from ..isa.enums import NkiInstruction
from ..isa.execute import account, handed_over, put, raw
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


@dataclass(frozen=True)
class _Call:
    """A checked call: what it moves, and `table`, the metadata when it was prepared."""

    member: Member
    srcs: list[NkiTensor]
    dsts: list[NkiTensor]
    metadata: NkiTensor
    recv_counts_known: bool
    same_for_all: bool
    table: Array | None = None

    def __str__(self) -> str:
        return self.member.instruction


def _collective(name: str, *, same_for_all: bool, prepares: bool, doc: str) -> Collective:
    """A function of the API: all four take the same arguments."""

    def collective(
        srcs: list[NkiTensor],
        dsts: list[NkiTensor],
        replica_group: ReplicaGroup,
        metadata_tensor: NkiTensor,
        recv_counts_known: bool = False,
        has_rdispls: bool = False,
        priority: int | None = None,
        name: str | None = None,
    ) -> NkiInstruction:
        member = join(f"ncc.{collective.__name__}", replica_group)
        call = _Call(member, srcs, dsts, metadata_tensor, recv_counts_known, same_for_all)
        _check(call, has_rdispls, priority)
        return _prepare(call) if prepares else _move(call)

    collective.__name__ = collective.__qualname__ = name
    collective.__doc__ = doc
    return collective


Collective = Callable[..., NkiInstruction]
_PREPARES = (
    "Read the metadata of an {}; `{}_trigger` moves the data. One can be prepared at a time."
)

all_gather_v = _collective(
    "all_gather_v",
    same_for_all=True,
    prepares=False,
    doc="Every rank gets the chunk that each rank names in column 0, in equal slots of dst.",
)
all_gather_v_prepare = _collective(
    "all_gather_v_prepare",
    same_for_all=True,
    prepares=True,
    doc=_PREPARES.format("all_gather_v", "all_gather_v"),
)
all_to_all_v = _collective(
    "all_to_all_v",
    same_for_all=False,
    prepares=False,
    doc="Every rank sends to each rank the chunk that the metadata names, into equal slots of dst.",
)
all_to_all_v_prepare = _collective(
    "all_to_all_v_prepare",
    same_for_all=False,
    prepares=True,
    doc=_PREPARES.format("all_to_all_v", "all_to_all_v"),
)


def all_gather_v_trigger(prepare_instr: NkiInstruction, name: str | None = None) -> NkiInstruction:
    """Move the data of the all_gather_v that was prepared."""
    return _trigger("ncc.all_gather_v_trigger", prepare_instr, same_for_all=True)


def all_to_all_v_trigger(prepare_instr: NkiInstruction, name: str | None = None) -> NkiInstruction:
    """Move the data of the all_to_all_v that was prepared."""
    return _trigger("ncc.all_to_all_v_trigger", prepare_instr, same_for_all=False)


def _check(call: _Call, has_rdispls: bool, priority: Any) -> None:
    member = call.member
    if call.same_for_all and member.size != _GATHER_RANKS:
        raise NkiValidationError(
            f"{call}: {member.size} ranks in the group; allowed: {_GATHER_RANKS}"
        )
    if call.same_for_all and current().num_cores != 2:
        raise NkiValidationError(f"{call}: needs LNC=2; launch kernel[2](...)")
    if has_rdispls:
        raise NkiValidationError(
            f"{call}: has_rdispls=True is not supported: it goes with groups of several nodes, "
            "which do not exist here"
        )
    check_no_priority(str(call), priority)
    check_tensors(str(call), call.srcs, call.dsts, coalesced=False)
    _check_metadata(member, call.metadata)


def _prepare(call: _Call) -> NkiInstruction:
    """Read the metadata and keep the call in the core's one slot."""
    core = current()
    if core.prepared is not None:
        raise NkiValidationError(
            f"{call}: {core.prepared} is prepared already; trigger it first, there is one slot"
        )
    core.prepared = replace(call, table=raw_metadata(call.metadata, str(call), call.member.size))
    instruction = handed_over(account((), (call.metadata,)))
    core.prepared_by = instruction
    return instruction


def _trigger(me: str, prepare_instr: Any, *, same_for_all: bool) -> NkiInstruction:
    core = current()
    call = core.prepared
    if not isinstance(call, _Call) or prepare_instr is not core.prepared_by:
        raise NkiValidationError(
            f"{me}: prepare_instr {prepare_instr!r} is not the prepared collective; allowed: what "
            f"{me.replace('trigger', 'prepare')} returned, once"
        )
    if call.same_for_all is not same_for_all:
        raise NkiValidationError(f"{me}: {call} prepared another collective")
    core.prepared = None
    return _move(replace(call, member=replace(call.member, instruction=me)))


def _move(call: _Call) -> NkiInstruction:
    member, dst, metadata = call.member, call.dsts[0], call.metadata
    me = member.instruction
    slot = dst.size // member.size

    def deliver(values: list[list[Array]]) -> None:
        column = 0 if call.same_for_all else member.position
        out = dst.v.array.reshape(-1).copy()
        counts = values[member.position][1].reshape(_ROWS, member.size).copy()
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
        if not call.recv_counts_known:
            put(metadata, counts.reshape(metadata.shape), me)

    return run(member, call.srcs, call.dsts, deliver, metadata, call.table)


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
