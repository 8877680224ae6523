"""Who takes part in a collective, and how the ranks of a group hand values to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import trace
from ..core import current
from ..dtypes import Array
from ..errors import NkiValidationError
from ..isa.enums import NkiInstruction
from ..isa.execute import account, handed_over, put, raw
from ..lnc import _PairedCore
from ..nkiobject import NKIObject
from ..ranks import current_world
from ..regions import SHARED_HBM
from ..tensor import NkiTensor

Deliver = Callable[[list[list[Array]]], None]


@dataclass
class ReplicaGroup(NKIObject):
    """The groups of ranks that communicate, as lists without overlap."""

    replica_groups: list[list[int]]


@dataclass(frozen=True)
class Member:
    """A rank in its group: `ranks` in the order of the list, `position` of the rank there."""

    instruction: str
    ranks: tuple[int, ...]
    position: int

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


def this_rank() -> int:
    """The rank that runs now; 0 outside run_ranks."""
    world = current_world()
    return 0 if world is None else world.now


def join(instruction: str, replica_group: Any) -> Member:
    """Return this rank's place in the replica group.

    NkiValidationError for overlapping lists, ranks that do not exist, or a rank without a list.
    """
    if not isinstance(replica_group, ReplicaGroup):
        raise NkiValidationError(
            f"{instruction}: replica_group {replica_group!r}; allowed: a ReplicaGroup"
        )
    world = current_world()
    num_ranks = 1 if world is None else world.num_ranks
    lists = [tuple(ranks) for ranks in replica_group.replica_groups]
    flat = [rank for ranks in lists for rank in ranks]
    if len(flat) != len(set(flat)):
        raise NkiValidationError(f"{instruction}: replica groups {lists} overlap")
    if any(rank not in range(num_ranks) for rank in flat):
        raise NkiValidationError(
            f"{instruction}: replica groups {lists} with {num_ranks} rank(s) running; launch the "
            "kernel on all of them with segattn.reference.nki.run_ranks"
        )
    rank = this_rank()
    for ranks in lists:
        if rank in ranks:
            return Member(instruction, ranks, ranks.index(rank))
    raise NkiValidationError(f"{instruction}: rank {rank} is in none of the groups {lists}")


def check_no_priority(instruction: str, priority: Any) -> None:
    """DMA priorities exist from NeuronCore-v4 on."""
    if priority is not None:
        raise NkiValidationError(f"{instruction}: priority {priority!r} exists on trn3 only")


def check_tensors(
    instruction: str,
    srcs: Any,
    dsts: Any,
    *,
    on_chip: bool = False,
    coalesced: bool = True,
) -> None:
    """Check lists of source and destination tensors: where they are, how many, their dtypes."""
    for label, tensors in (("srcs", srcs), ("dsts", dsts)):
        if not isinstance(tensors, list | tuple) or not tensors:
            raise NkiValidationError(
                f"{instruction}: {label} {tensors!r}; allowed: a list of tensors"
            )
        for tensor in tensors:
            if not isinstance(tensor, NkiTensor):
                raise NkiValidationError(f"{instruction}: {label} holds {tensor!r}, not a tensor")
    if len(srcs) != len(dsts):
        raise NkiValidationError(
            f"{instruction}: {len(srcs)} srcs and {len(dsts)} dsts; the numbers must agree"
        )
    tensors = [*srcs, *dsts]
    outside = [t for t in tensors if t.v.layout.on_chip]
    if outside and not on_chip:
        raise NkiValidationError(
            f"{instruction}: {outside[0].name!r} is in {outside[0].buffer.value}; allowed: HBM"
        )
    if outside and any(t.buffer.value != "sbuf" for t in tensors):
        where = sorted({t.buffer.value for t in tensors})
        raise NkiValidationError(
            f"{instruction}: tensors in {', '.join(where)}; allowed: all in HBM or all in sbuf"
        )
    if len(srcs) > 1 and (outside or not coalesced):
        why = "in SBUF" if outside else "here"
        raise NkiValidationError(f"{instruction}: {len(srcs)} tensors; limit 1 {why}")
    for source, dst in zip(srcs, dsts, strict=True):
        if source.dtype != dst.dtype:
            raise NkiValidationError(
                f"{instruction}: src is {source.dtype}, dst {dst.dtype}; dtypes must agree"
            )


def run(
    member: Member,
    srcs: Sequence[NkiTensor],
    dsts: Sequence[NkiTensor],
    deliver: Deliver,
    metadata: NkiTensor | None = None,
    table: Array | None = None,
) -> NkiInstruction:
    """Exchange copies of `srcs` (and of the metadata) within the group, then `deliver` the values.

    `table` is what the metadata held when the collective was prepared, None to read it now.

    `deliver` gets the arrays of every rank of the group in group order. With two cores per rank,
    shared HBM is exchanged once and both cores wait for it; SBUF and private HBM per core.
    """
    me = member.instruction
    core = current()
    paired = isinstance(core, _PairedCore)
    others = () if metadata is None else (metadata,)
    shared = all(t.buffer is SHARED_HBM for t in (*srcs, *dsts, *others))
    if isinstance(core, _PairedCore):
        core.rendezvous(me, "begin", None)
    if not (paired and shared) or core.index == 0:
        posted = [raw(t, me, "srcs").copy() for t in srcs]
        posted += [raw(t, me, "metadata_tensor").copy() if table is None else table for t in others]
        kind = f"{me} on core {core.index}" if paired and not shared else me
        deliver(_exchange(member, kind, posted))
    if isinstance(core, _PairedCore):
        core.rendezvous(me, "end", None)
    number = account(tuple(dsts), tuple(srcs))
    if trace.active is not None:
        reads = tuple([t.access for t in srcs])
        trace.active.dma(me, core.index, tuple([t.access for t in dsts]), reads)
    return handed_over(number)


def _exchange(member: Member, kind: str, posted: list[Array]) -> list[list[Array]]:
    world = current_world()
    if world is None:
        return [posted]
    values = world.exchange(world.now, kind, member.ranks, posted)
    return [values[rank] for rank in member.ranks]


def write(member: Member, dst: NkiTensor, values: Array) -> None:
    """Store the values, in row-major order, to a destination of as many elements."""
    layout = dst.v.layout
    if values.size != dst.size:
        raise NkiValidationError(
            f"{member.instruction}: the result has shape {values.shape}, dst {layout.shape}"
        )
    put(dst, values.reshape(layout.shape), member.instruction)
