"""dma_transpose: reversal of dimensions on the way from HBM (or SBUF) to SBUF."""

from __future__ import annotations

from typing import Any, Final

from ..access_pattern import out_of_bounds, resolve, scalar_index
from ..core import current
from ..dtypes import DEVICE_ITEMSIZE
from ..errors import NkiValidationError
from ..regions import HBM, SBUF
from ..rules.dma_shapes import check_transposed_rows
from ..rules.loop_dma import check_loop_dma
from ..rules.scatter import check_skipped_rows
from ..tensor import NkiTensor
from .dma import check_dma_operand, check_dma_options, load, record_dma, store
from .dma_rows import gather_rows, store_transposed_rows
from .enums import NkiInstruction, as_dge_mode, dge_mode, oob_mode
from .operands import check_destination

AXES: Final = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
MAX_LAST_DIM: Final = 128


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: tuple[int, ...] | None = None,
    priority: int | None = None,
    dge_mode: dge_mode = dge_mode.unknown,
    oob_mode: oob_mode = oob_mode.error,
    name: str | None = None,
) -> NkiInstruction:
    """Store dst = src transposed by (1,0), (2,1,0) or (3,1,2,0), bit exact.

    With a vector_offset on src, rows are gathered first (2-byte dtypes); rows out of bounds under
    oob_mode.skip leave their columns of dst untouched.
    """
    me = "nisa.dma_transpose"
    dge_mode = as_dge_mode(me, dge_mode)
    permutation = _check(me, dst, src, axes, priority, dge_mode, oob_mode)
    check_transposed_rows(me, dst)
    skip = oob_mode is _SKIP
    region = current().region
    if region is not None and (skip or dge_mode is _NONE):
        check_loop_dma(me, region, dst, static=dge_mode is _NONE, skips=skip)
    dynamic = src.dynamic
    skipped = 0
    if dynamic is not None and dynamic.vector:
        _check_indirect(me, src, dge_mode)
        values, valid = gather_rows(me, src, skip)
        skipped = int((~valid).sum())
        values = values.transpose(permutation)
        if skipped:
            store_transposed_rows(me, dst, values, valid)
        else:
            store(me, dst, values)
    else:
        view = src.v if dynamic is None else resolve(src, me)
        if view is None:
            if not skip:
                raise out_of_bounds(src, me, "src")
            check_skipped_rows(me, "src", src.name, scalar_index(src, me))
            skipped = src.shape[0]
        else:
            store(me, dst, load(me, src, view).transpose(permutation))
    return record_dma(
        "dma_transpose", (dst,), (src,), dge_mode, transpose=True, skipped_rows=skipped
    )


_SKIP: Final = oob_mode.skip
_NONE: Final = dge_mode.none


def _check(
    me: str, dst: Any, src: Any, axes: Any, priority: Any, dge: Any, oob: Any
) -> tuple[int, ...]:
    check_dma_operand(me, "dst", dst)
    check_dma_operand(me, "src", src)
    check_destination(me, dst)
    check_dma_options(me, priority, oob, dge)
    if dst.buffer is not SBUF:
        raise NkiValidationError(f"{me}: operand dst is in {dst.buffer.value}; allowed: SBUF")
    if dst.dtype != src.dtype:
        raise NkiValidationError(
            f"{me}: dst has dtype {dst.dtype}, src {src.dtype}; they must be the same"
        )
    if dst.dynamic is not None:
        raise NkiValidationError(f"{me}: dst has a run-time address; allowed: src only")
    permutation = AXES.get(src.ndim)
    if permutation is None:
        raise NkiValidationError(f"{me}: src has {src.ndim} dimensions; allowed: 2, 3, 4")
    if axes is not None and tuple(axes) != permutation:
        raise NkiValidationError(
            f"{me}: axes {axes} for {src.ndim} dimensions; allowed: {permutation}"
        )
    shape = tuple(src.shape[a] for a in permutation)
    if dst.shape != shape:
        raise NkiValidationError(
            f"{me}: dst has shape {dst.shape}; needed {shape} for src {src.shape}"
        )
    if dge is dge_mode.none and src.dynamic is not None:
        raise NkiValidationError(
            f"{me}: dge_mode.none, whose descriptors are static, with a run-time address on src; "
            "allowed: unknown, hwdge, swdge"
        )
    if dge is dge_mode.hwdge:
        _check_hardware(me, src)
    if dge is dge_mode.swdge and (src.dynamic is None or not src.dynamic.vector):
        raise NkiValidationError(f"{me}: swdge transposes only with a vector_offset on src")
    if oob is oob_mode.skip and src.dynamic is None:
        raise NkiValidationError(f"{me}: oob_mode.skip goes with a run-time address on src only")
    return permutation


def _check_hardware(me: str, src: NkiTensor) -> None:
    """Restrictions of a hardware-DGE transpose."""
    rows = src.shape[0]
    if src.ndim == 2 and rows != 16:
        raise NkiValidationError(f"{me}: hwdge with src {src.shape}; a 2-D src has 16 rows")
    if src.ndim > 2 and (rows not in (1, 2, 4, 8, 16) or rows * src.shape[-2] % 16):
        raise NkiValidationError(
            f"{me}: hwdge with src {src.shape}; shape[0] must be 1, 2, 4, 8 or 16 and "
            "shape[0] * shape[-2] a multiple of 16"
        )
    _check_elements(me, src)


def _check_elements(me: str, src: NkiTensor) -> None:
    if src.shape[-1] > MAX_LAST_DIM:
        raise NkiValidationError(
            f"{me}: src has last dimension {src.shape[-1]}; limit {MAX_LAST_DIM}"
        )
    if DEVICE_ITEMSIZE[src.dtype] != 2:
        raise NkiValidationError(
            f"{me}: src has dtype {src.dtype} ({DEVICE_ITEMSIZE[src.dtype]} bytes); "
            "allowed: 2 bytes"
        )


def _check_indirect(me: str, src: NkiTensor, dge: dge_mode) -> None:
    """Restrictions of a gather-transpose."""
    assert src.dynamic is not None
    index = src.dynamic.index
    assert isinstance(index, NkiTensor)
    if dge not in (_UNKNOWN, _SWDGE):
        raise NkiValidationError(f"{me}: vector_offset with {dge}; allowed: unknown, swdge")
    _check_elements(me, src)
    if src.buffer not in HBM:
        raise NkiValidationError(f"{me}: src with vector_offset must be in HBM")
    if src.shape[0] % 16:
        raise NkiValidationError(
            f"{me}: src has {src.shape[0]} gathered rows; allowed: multiples of 16"
        )
    if src.ndim == 4 and 1 not in src.shape[1:3]:
        raise NkiValidationError(f"{me}: src {src.shape}: dimension 1 or 2 must be 1")
    rows = index.shape[0]
    if index.ndim != 2 or index.dtype != "uint32" or rows % 16 or not 16 <= rows <= 128:
        raise NkiValidationError(
            f"{me}: vector_offset of shape {index.shape}, dtype {index.dtype}; allowed: 2-D "
            "uint32 with 16..128 rows, a multiple of 16"
        )
    if index.shape[1] > 1 and rows != 128:
        raise NkiValidationError(
            f"{me}: vector_offset of shape {index.shape}; more than one column needs 128 rows"
        )


_UNKNOWN: Final = dge_mode.unknown
_SWDGE: Final = dge_mode.swdge
