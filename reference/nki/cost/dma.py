"""DMA: descriptors, the 16 engines of a core, and what one transfer asks of each of them.

A descriptor moves a run that is contiguous on both sides. One engine serves 8 partitions;
transfers without an on-chip side go to the engines in turn.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from ..records import Access, Dma
from .constants import CostConstants

NUM_ENGINES = 16
PARTITIONS_PER_ENGINE = 8
MIN_SPLIT_BYTES = 512
"""A contiguous copy without an on-chip side is split over the engines into pieces of at least
this size (assumed)."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one DMA instruction asks of the machine."""

    nbytes: int
    """Payload."""
    hbm_bytes: int
    """Bytes read from plus bytes written to HBM."""
    num_descriptors: int
    engine_ns: NDArray[np.float64]
    """[16] time of each engine."""


def _piece(a: int, b: int) -> int:
    """Longest piece that neither side breaks: the shorter run when it divides the longer."""
    short, long = min(a, b), max(a, b)
    return short if long % short == 0 else gcd(short, long)


def _row_bytes(access: Access) -> int:
    """Bytes of one contiguous row: of the innermost dimension."""
    dims = access.free_dims
    size, stride = dims[-1] if dims else (1, access.itemsize)
    return size * access.itemsize if stride == access.itemsize else access.itemsize


def _engines_of(access: Access) -> NDArray[np.int64]:
    """[partitions] engine that serves each partition."""
    partitions = access.partition + np.arange(access.num_partitions)
    return partitions // PARTITIONS_PER_ENGINE


def _source(record: Dma) -> Access:
    return record.reads[0]


def transfer(record: Dma, c: CostConstants) -> Transfer:
    """Cost of the payload of one DMA instruction. A DMA that moves nothing costs nothing here."""
    dst = record.writes[0]
    sources = record.reads[: _num_sources(record)]
    nbytes = dst.nbytes
    descriptors = 0
    engine_ns = np.zeros(NUM_ENGINES)
    for src in sources:
        count, time = _one_source(record, src, dst, c)
        descriptors += count
        engine_ns += time
    hbm_bytes = sum(a.nbytes for a in (*sources, dst) if a.buffer == "hbm")
    if record.skipped_rows:
        moved = _moved_share(record)
        nbytes, hbm_bytes = int(nbytes * moved), int(hbm_bytes * moved)
    if record.transpose:
        if sources[0].on_chip and dst.on_chip:
            share = nbytes / NUM_ENGINES
            rate = c.dma_transpose_sbuf * c.dma_documented_engine_rate
            engine_ns = np.maximum(engine_ns, share / rate)
        else:
            engine_ns /= c.dma_transpose_hbm
    if record.opcode == "dma_compute":
        engine_ns /= c.dma_compute_share
    return Transfer(nbytes, hbm_bytes, descriptors, engine_ns)


def _num_sources(record: Dma) -> int:
    """Data operands in `reads`; behind them comes one index for each indirect operand."""
    if record.opcode != "dma_compute":
        return 1
    return len(record.reads) - sum(a.indirect for a in (*record.writes, *record.reads))


def _moved_share(record: Dma) -> float:
    """Share of the bytes that is not skipped; a scalar offset skips all rows or none."""
    skipped = record.skipped_rows
    if not skipped:
        return 1.0
    for access in (record.reads[0], record.writes[0]):
        if access.indirect:
            return 1 - skipped / access.shape[0]
    if skipped == record.reads[0].shape[0] or skipped == record.writes[0].shape[0]:
        return 0.0
    raise ValueError(f"{record.opcode} skips {record.skipped_rows} rows but is not indirect")


def _one_source(
    record: Dma, src: Access, dst: Access, c: CostConstants
) -> tuple[int, NDArray[np.float64]]:
    """Descriptors and [16] engine time of one source."""
    if dst.num_elements == 0:
        return 0, np.zeros(NUM_ENGINES)
    itemsize = max(src.itemsize, dst.itemsize)
    # A transpose takes its source row by row; on the other side each element goes alone.
    piece = _row_bytes(src) if record.transpose else _piece(src.run_bytes, dst.run_bytes)
    total = max(src.nbytes, dst.nbytes)
    piece = max(itemsize, min(piece, total))
    on_chip = dst if dst.on_chip else src
    if not on_chip.on_chip:
        if total // piece < NUM_ENGINES:
            piece = max(min(piece, MIN_SPLIT_BYTES), total // NUM_ENGINES)
        count = -(-total // piece)
        per_engine = np.full(NUM_ENGINES, count // NUM_ENGINES)
        per_engine[: count % NUM_ENGINES] += 1
        return count, per_engine * (c.dma_descriptor_ns + piece / c.dma_engine_rate)
    count = -(-total // piece)
    engines = _engines_of(on_chip)
    if record.transpose:
        # Rows of a transpose end up in every partition: they go to the engines in turn.
        share = np.full(NUM_ENGINES, 1 / NUM_ENGINES)
    else:
        share = np.bincount(engines, minlength=NUM_ENGINES) / len(engines)
    moved = _moved_share(record)
    # A skipped row still takes its descriptor's slot (assumed).
    time = count * (c.dma_descriptor_ns + moved * piece / c.dma_engine_rate)
    return count, share * time
