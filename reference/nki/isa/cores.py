"""Instructions between the two cores of a logical NeuronCore: sendrecv and core_barrier."""

from __future__ import annotations

from typing import Any, Final

from .. import trace
from ..core import current
from ..dtypes import DEVICE_ITEMSIZE
from ..errors import NkiValidationError
from ..lnc import NUM_RANKS, _PairedCore
from ..records import Engine
from ..regions import SHARED_HBM
from ..tensor import NkiTensor
from .enums import NkiInstruction, dma_engine, engine
from .execute import account, handed_over, put, put_where, view_of
from .operands import SBUF_ONLY, check_destination, check_tile

_GPSIMD_BYTES: Final = {4: 1024, 2: 512, 1: 256}
"""Bytes per partition that GpSimd's own DMA moves, by item size."""


def _paired(me: str) -> _PairedCore:
    core = current()
    if not isinstance(core, _PairedCore):
        raise NkiValidationError(f"{me}: needs two cores; launch the kernel as kernel[2](...)")
    return core


def sendrecv(
    src: NkiTensor,
    dst: NkiTensor,
    send_to_rank: int,
    recv_from_rank: int,
    pipe_id: int,
    dma_engine: dma_engine = dma_engine.dma,
    name: str | None = None,
) -> NkiInstruction:
    """Send src to a core and receive dst from one, when both have come to the same pipe_id."""
    me = "nisa.sendrecv"
    core = _paired(me)
    _check_sendrecv(me, src, dst, send_to_rank, recv_from_rank, dma_engine)
    view = view_of(src, me, "src")
    missing = src.storage.unwritten_in(view)
    sent = (view.array.copy(), missing, send_to_rank)
    posts = core.rendezvous("sendrecv", f"pipe {pipe_id}", sent)
    values, missing, receiver = posts[recv_from_rank]
    if receiver != core.index:
        raise NkiValidationError(
            f"{me}: core {core.index} receives from rank {recv_from_rank}, which sends to rank "
            f"{receiver}; send_to_rank and recv_from_rank of the two cores must match"
        )
    if missing is None:
        put(dst, values, me)
    else:
        # Moving what nothing wrote harms nobody who does not read it: it arrives as not written.
        put_where(dst, values, ~missing, me)
    number = account((dst,), (src,))
    if trace.active is not None:
        trigger = "gpsimd" if dma_engine is _GPSIMD_DMA else ""
        trace.active.dma("sendrecv", core.index, (dst.access,), (src.access,), trigger)
    return handed_over(number)


_GPSIMD_DMA: Final = dma_engine.gpsimd_dma


def _check_sendrecv(
    me: str, src: Any, dst: Any, send_to: Any, receive_from: Any, mover: Any
) -> None:
    source = check_tile(me, "src", src, regions=SBUF_ONLY)
    out = check_tile(me, "dst", dst, regions=SBUF_ONLY)
    check_destination(me, dst)
    if source.dtype != out.dtype or source.shape != out.shape:
        raise NkiValidationError(
            f"{me}: src is {source.dtype} {source.shape}, dst {out.dtype} {out.shape}; dtype and "
            "shape must agree"
        )
    for label, rank in (("send_to_rank", send_to), ("recv_from_rank", receive_from)):
        if rank not in range(NUM_RANKS):
            raise NkiValidationError(f"{me}: {label} {rank!r}; allowed: 0, 1")
    if not isinstance(mover, dma_engine):
        raise NkiValidationError(f"{me}: dma_engine {mover!r}; allowed: dma, gpsimd_dma")
    itemsize = DEVICE_ITEMSIZE[source.dtype]
    limit = _GPSIMD_BYTES[itemsize]
    if mover is _GPSIMD_DMA and source.free * itemsize > limit:
        raise NkiValidationError(
            f"{me}: {source.free * itemsize} bytes per partition of {source.dtype}; limit "
            f"{limit} with dma_engine.gpsimd_dma"
        )


def core_barrier(
    data: NkiTensor,
    cores: tuple[int, ...],
    engine: engine = engine.gpsimd,
    name: str | None = None,
) -> NkiInstruction:
    """Wait until both cores are here; what they wrote to shared HBM is then visible to both."""
    me = "nisa.core_barrier"
    core = _paired(me)
    if not isinstance(data, NkiTensor) or data.buffer is not SHARED_HBM:
        raise NkiValidationError(f"{me}: data must be a tensor in shared_hbm")
    if tuple(cores) != (0, 1):
        raise NkiValidationError(f"{me}: cores {cores}; allowed: (0, 1)")
    core.rendezvous("core_barrier", "", None)
    data.storage.copied_at = 0
    number = account((), ())
    if trace.active is not None:
        trace.active.compute(_barrier_engine(me, engine), "core_barrier", core.index, (), ())
    return handed_over(number)


def _barrier_engine(me: str, chosen: Any) -> Engine:
    if not isinstance(chosen, engine) or chosen in (engine.unknown, engine.dma):
        raise NkiValidationError(
            f"{me}: engine {chosen!r}; allowed: tensor, vector, scalar, gpsimd, sync"
        )
    name: Engine = chosen.name  # type: ignore[assignment]  # the names agree
    return name
