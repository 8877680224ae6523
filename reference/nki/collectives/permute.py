"""collective_permute along pairs, and the implicit ring with its rank ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dtypes import Array
from ..errors import NkiValidationError
from ..registers import VirtualRegister
from ..tensor import NkiTensor
from .members import (
    Member,
    ReplicaGroup,
    check_no_priority,
    check_tensors,
    join,
    run,
    this_rank,
    write,
)
from .regular import reduction

_MAX_CHANNELS = 4


def collective_permute(
    srcs: list[NkiTensor],
    dsts: list[NkiTensor],
    source_target_pairs: list[tuple[int, int]],
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Each pair (source, target) sends srcs of the source to dsts of the target.

    The dsts of a rank that is nobody's target keep their contents.
    """
    me = "ncc.collective_permute"
    pairs = [tuple(pair) for pair in source_target_pairs]
    sources, targets = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    for label, ranks in (("source", sources), ("target", targets)):
        if len(ranks) != len(set(ranks)):
            raise NkiValidationError(f"{me}: pairs {pairs} name a {label} twice")
    check_no_priority(me, priority)
    check_tensors(me, srcs, dsts, coalesced=False)
    involved = sorted({*sources, *targets})
    if this_rank() not in involved:
        return
    member = join(me, ReplicaGroup([involved]))

    def deliver(values: list[list[Array]]) -> None:
        for source, target in pairs:
            if target == member.ranks[member.position]:
                write(member, dsts[0], values[member.ranks.index(source)][0])

    run(member, srcs, dsts, deliver)


def collective_permute_implicit(
    srcs_by_channel: list[list[NkiTensor]],
    dsts_by_channel: list[list[NkiTensor]],
    replica_group: ReplicaGroup,
    channel_ids: list[int] = [0],  # noqa: B006  # NKI's signature; never changed
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Each rank sends to its successor in the group's ring and receives from its predecessor."""
    member = join("ncc.collective_permute_implicit", replica_group)
    check_no_priority(member.instruction, priority)
    srcs = _by_channel(member, "srcs_by_channel", srcs_by_channel, channel_ids)
    dsts = _by_channel(member, "dsts_by_channel", dsts_by_channel, channel_ids)
    _check_channels(member, srcs, dsts)

    def deliver(values: list[list[Array]]) -> None:
        predecessor = values[(member.position - 1) % member.size]
        for dst, array in zip(dsts, predecessor, strict=True):
            write(member, dst, array)

    run(member, srcs, dsts, deliver)


def collective_permute_implicit_reduce(
    srcs0_by_channel: list[list[NkiTensor]],
    srcs1_by_channel: list[list[NkiTensor]],
    dsts_by_channel: list[list[NkiTensor]],
    replica_group: ReplicaGroup,
    op: Any,
    channel_ids: list[int] = [0],  # noqa: B006  # NKI's signature; never changed
    priority: int | None = None,
    name: str | None = None,
) -> None:
    """Each rank sends op(srcs0, srcs1) to its successor and receives its predecessor's."""
    member = join("ncc.collective_permute_implicit_reduce", replica_group)
    check_no_priority(member.instruction, priority)
    srcs0 = _by_channel(member, "srcs0_by_channel", srcs0_by_channel, channel_ids)
    srcs1 = _by_channel(member, "srcs1_by_channel", srcs1_by_channel, channel_ids)
    dsts = _by_channel(member, "dsts_by_channel", dsts_by_channel, channel_ids)
    _check_channels(member, srcs0, dsts)
    _check_channels(member, srcs1, dsts)
    reduce = reduction(member, op, srcs0[0].dtype)

    def deliver(values: list[list[Array]]) -> None:
        predecessor = values[(member.position - 1) % member.size]
        for index, dst in enumerate(dsts):
            write(member, dst, reduce([predecessor[index], predecessor[len(dsts) + index]]))

    run(member, [*srcs0, *srcs1], dsts, deliver)


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int,
    replica_group: ReplicaGroup,
    channel_id: int = 0,
    name: str | None = None,
) -> VirtualRegister:
    """Return the rank whose data is here after `iteration_id` steps of the ring, in a register."""
    member = join("ncc.collective_permute_implicit_current_processing_rank_id", replica_group)
    if channel_id not in range(_MAX_CHANNELS):
        raise NkiValidationError(
            f"{member.instruction}: channel_id {channel_id!r}; allowed: 0..{_MAX_CHANNELS - 1}"
        )
    return VirtualRegister(member.ranks[(member.position - int(iteration_id)) % member.size])


def rank_id(name: str | None = None) -> VirtualRegister:
    """Return the id of this rank in a register."""
    return VirtualRegister(this_rank())


def _check_channels(member: Member, srcs: list[NkiTensor], dsts: list[NkiTensor]) -> None:
    """The tensors of a channel are both in HBM or, as published kernels have them, in SBUF."""
    for src, dst in zip(srcs, dsts, strict=True):
        check_tensors(member.instruction, [src], [dst], on_chip=True)


def _by_channel(
    member: Member, label: str, tensors: Any, channel_ids: Sequence[int]
) -> list[NkiTensor]:
    """Return one tensor per channel after the rules of the channel lists."""
    channels = list(channel_ids)
    if channels != list(range(len(channels))) or not 1 <= len(channels) <= _MAX_CHANNELS:
        raise NkiValidationError(
            f"{member.instruction}: channel_ids {channels}; allowed: consecutive from 0, at most "
            f"{_MAX_CHANNELS}"
        )
    if not isinstance(tensors, list | tuple) or len(tensors) != len(channels):
        raise NkiValidationError(
            f"{member.instruction}: {label} has {len(tensors)} lists for {len(channels)} channels"
        )
    for inner in tensors:
        if not isinstance(inner, list | tuple) or len(inner) != 1:
            raise NkiValidationError(
                f"{member.instruction}: each list of {label} holds exactly one tensor"
            )
    return [inner[0] for inner in tensors]
