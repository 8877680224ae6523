"""Static rules that every operand of an on-chip instruction obeys."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any, TypeGuard

from ..errors import NkiValidationError
from ..layout import Layout
from ..regions import NUM_PARTITIONS, ON_CHIP, PSUM, SBUF, MemoryRegion
from ..strict import violation
from ..tensor import NkiTensor

MAX_SBUF_FREE = 65535
"""Elements per partition that the 16-bit size field of a pattern can count."""
MAX_PSUM_FREE = 4096
"""Elements per partition of a PSUM pattern: the 16 KiB of a partition in float32. A dimension of
step 0 does not count (AWS's layernorm_tkg broadcasts a column in PSUM to 12288 elements).
"""
MAX_FREE_DIMS = 4
MIN_FREE_STEP, MAX_FREE_STEP = -(2**15), 2**15 - 1
"""Steps of a free dimension, in elements: a 16-bit signed field (Trainium architecture guide)."""


def is_tensor(x: object) -> TypeGuard[NkiTensor]:
    """Whether an operand is a tensor."""
    return isinstance(x, NkiTensor)


def check_tile(
    instruction: str,
    operand: str,
    t: Any,
    *,
    regions: Collection[MemoryRegion] = ON_CHIP,
    dtypes: Collection[str] | None = None,
    why: str = "",
) -> Layout:
    """The layout of an on-chip operand after the rules common to all engines.

    NkiValidationError names instruction, operand, value and limit.
    """
    where = f"{instruction}: operand {operand}"
    if not isinstance(t, NkiTensor):
        raise NkiValidationError(f"{where} is a {type(t).__name__}; allowed: an NkiTensor")
    layout = t.v.layout
    if layout.region not in regions:
        allowed = ", ".join(sorted(r.value for r in regions))
        raise NkiValidationError(
            f"{where} {t.name!r} is in {layout.region.value}; allowed: {allowed}"
            + (f" ({why})" if why else "")
        )
    if t.dynamic is not None and t.dynamic.vector:
        raise NkiValidationError(
            f"{where} has a vector_offset; only dma_copy, dma_transpose and dma_compute gather"
        )
    if dtypes is not None and layout.dtype not in dtypes:
        raise NkiValidationError(
            f"{where} {t.name!r} has dtype {layout.dtype}; allowed: {', '.join(sorted(dtypes))}"
            + (f" ({why})" if why else "")
        )
    if dtypes is None and layout.dtype == "int64":
        raise NkiValidationError(
            f"{where} {t.name!r} has dtype int64, which instructions do not compute with; load it "
            "with nisa.scalar_load"
        )
    if layout.strides[0] not in (0, layout.row) and layout.partitions > 1:
        raise NkiValidationError(
            f"{where} {t.name!r} steps over {layout.strides[0] / layout.row:g} partitions; engines "
            "access neighbouring partitions: use dma_copy, which takes any"
        )
    if layout.partitions > NUM_PARTITIONS:
        raise NkiValidationError(
            f"{where} {t.name!r} has {layout.partitions} partitions; limit {NUM_PARTITIONS}"
        )
    if layout.free > MAX_SBUF_FREE:
        raise NkiValidationError(
            f"{where} {t.name!r} has {layout.free} elements per partition; limit {MAX_SBUF_FREE}: "
            "split the instruction"
        )
    if layout.region is PSUM and _distinct(layout) > MAX_PSUM_FREE:
        raise NkiValidationError(
            f"{where} {t.name!r} has {_distinct(layout)} elements per partition; limit "
            f"{MAX_PSUM_FREE} in psum: split the instruction"
        )
    steps = free_steps(layout)
    if len(steps) > MAX_FREE_DIMS:
        raise NkiValidationError(
            f"{where} {t.name!r} needs {len(steps)} free dimensions; "
            f"limit {MAX_FREE_DIMS} (shape {layout.shape}, strides {layout.strides})"
        )
    if steps and not (min(steps) >= MIN_FREE_STEP and max(steps) <= MAX_FREE_STEP):
        raise NkiValidationError(
            f"{where} {t.name!r} steps over {max(steps, key=abs)} elements in a free dimension; "
            f"allowed: {MIN_FREE_STEP}..{MAX_FREE_STEP} (shape {layout.shape}, strides "
            f"{layout.strides}); move the data closer, .view() it as a wider dtype, or use one "
            "instruction for each part"
        )
    check_start_partition(where, layout)
    return layout


def _distinct(layout: Layout) -> int:
    """Elements per partition without the repetitions of a broadcast dimension."""
    dims = zip(layout.shape[1:], layout.strides[1:], strict=True)
    return prod(n for n, stride in dims if stride)


def free_steps(layout: Layout) -> list[int]:
    """Steps of the free dimensions of the access pattern, those that form one run merged."""
    steps: list[int] = []
    for n, stride in zip(layout.shape[1:], layout.strides[1:], strict=True):
        if n == 1:
            continue
        if steps and steps[-1] == n * stride:
            steps.pop()
        steps.append(stride)
    return steps


def check_free_dims(me: str, limit: int = 3, **operands: Layout) -> None:
    """NkiValidationError for an operand with more free dimensions than an instruction takes."""
    for operand, layout in operands.items():
        if layout.ndim - 1 > limit:
            raise NkiValidationError(
                f"{me}: operand {operand} has {layout.ndim - 1} free dimensions; limit {limit}: "
                "merge some with .flatten_dims"
            )


def allowed_starts(num_partitions: int) -> tuple[int, ...]:
    """First partitions that an access to this many partitions may have."""
    if num_partitions > 64:
        return (0,)
    if num_partitions > 32:
        return (0, 64)
    return (0, 32, 64, 96)


def check_start_partition(where: str, layout: Layout) -> None:
    """Rule "start_partition" of the compute engines."""
    starts = allowed_starts(layout.partitions)
    if layout.start not in starts:
        violation(
            "start_partition",
            f"{where}: {layout.partitions} partitions from partition {layout.start}; allowed "
            f"start partitions: {', '.join(map(str, starts))}; move the data with dma_copy or "
            "access whole quadrants",
        )


def check_destination(where: str, t: NkiTensor) -> None:
    """A destination may not write one element twice; run-time rows are checked when known."""
    layout = t.v.layout
    first = 1 if t.dynamic is not None and t.dynamic.vector else 0
    dims = list(zip(layout.strides, layout.shape, strict=True))[first:]
    if any(s == 0 and n != 1 for s, n in dims):
        raise NkiValidationError(
            f"{where}: dst {t.name!r} has a broadcast dimension (shape {layout.shape}, strides "
            f"{layout.strides}); a destination must visit each element once"
        )


def check_same_size(
    instruction: str, operand: str, layout: Layout, dst: Layout, dst_name: str = "dst"
) -> None:
    """Same partitions and same elements per partition as the destination."""
    if layout.partitions != dst.partitions or layout.free != dst.free:
        column = layout.partitions == dst.partitions and layout.free == 1
        raise NkiValidationError(
            f"{instruction}: operand {operand} has shape {layout.shape} "
            f"({layout.partitions} partitions x {layout.free}), {dst_name} has {dst.shape} "
            f"({dst.partitions} x {dst.free}); both numbers must agree"
            + ("; nisa.tensor_scalar takes a column [P, 1] for all elements" if column else "")
        )


def check_vector(
    instruction: str,
    operand: str,
    t: Any,
    partitions: int,
    dtypes: Collection[str] | None = None,
) -> Layout:
    """A [partitions, 1] operand that is broadcast along the free dimensions."""
    layout = check_tile(instruction, operand, t, dtypes=dtypes)
    if layout.partitions != partitions or layout.free != 1:
        raise NkiValidationError(
            f"{instruction}: operand {operand} {t.name!r} has shape {layout.shape}; "
            f"allowed: a scalar or [{partitions}, 1]"
        )
    return layout


def check_not_both_psum(instruction: str, **operands: Layout) -> None:
    """The engine reads at most one of these operands from PSUM."""
    if all(layout.region is PSUM for layout in operands.values()):
        raise NkiValidationError(
            f"{instruction}: operands {' and '.join(operands)} are both in PSUM; at most one may "
            "be: copy the other to SBUF with tensor_copy first"
        )


SBUF_ONLY = frozenset({SBUF})
PSUM_ONLY = frozenset({PSUM})
