"""Modelled time of a traced launch, worked out a second time in another way.

The cost model plays events in order of time, with edges between instructions; this goes through
the trace once in program order and keeps, for every stretch of memory, when it was written and read
last. The rules are those of docs/decisions.md, written again, with base constants. DMA is one
server with room in every quarter of a microsecond. Two cores wait for each other where they meet.
"""

from collections import defaultdict
from collections.abc import Generator
from math import gcd
from typing import Any

import numpy as np

from segattn.reference.nki.records import Access, Dma, Instruction, Launch, LoopMark, Matmul, Record

GHZ = {"tensor": 2.4, "scalar": 1.2, "vector": 0.96, "gpsimd": 1.2, "sync": 1.2}
HOP_NS = {engine: 60 / GHZ["vector" if engine == "vector" else "scalar"] for engine in GHZ}
HOP_NS["tensor"] = 60 / 2.4
TRIP_NS, TABLE_NS, RAMP_NS, MEET_NS = 9000.0, 1280.0, 3000.0, 1000.0
ISSUE_NS, FIRST_NS, LAST_NS = 600.0, 740.0, 300.0
TIMES = {"scalar_tensor_tensor": 2, "tensor_tensor_scan": 2, "reciprocal": 8}
HALF, ANY_TABLE = ("bfloat16", "float16"), ("", "copy", "square", "abs", "relu", "sign")
CELL, BUCKET_NS = {"sbuf": 4, "psum": 32, "hbm": 256, "register": 4}, 250.0


def compute_ns(r: Instruction) -> tuple[float, float]:
    """How long an instruction holds its engine, and until its result is there."""
    ghz, operands = GHZ[r.engine], (*r.writes, *r.reads)
    if r.engine == "sync" or r.opcode.startswith(("register_", "core_barrier")):
        return (0.0, 0.0) if r.opcode == "core_barrier" else (100.0, 100.0)
    far = [abs(a.inner_stride) > 16 and a.free_size > 1 for a in r.reads if a.on_chip]
    if r.engine == "tensor":
        data, moving, passes, slow = r.reads[0], r.reads[0].num_partitions, 2, 1 + any(far)
        if isinstance(r, Matmul):
            moving, slow, passes = r.N, 1 + far[-1], 2 if r.is_transpose else 4
        cycles = max(min(64, data.free_size), moving) * slow
        cycles *= passes if "float32" in (data.dtype, r.reads[-1].dtype) else 1
        return cycles / ghz, (cycles + 64) / ghz
    if r.engine == "gpsimd":
        n = (1 + any(far)) * max((a.free_size for a in operands), default=0) + 150
        return n / ghz, (n + 150) / ghz
    first = (*r.writes[:1], *r.reads[:1])
    columns: float = max(a.free_size for a in first)
    if r.engine == "vector":
        in_psum = sum(a.buffer == "psum" for a in first)
        tight = all(a.inner_stride == a.itemsize for a in first)
        if r.opcode in ("tensor_copy", "tensor_scalar") and all(a.dtype in HALF for a in first):
            columns /= {(0, True): 4, (0, False): 2, (1, True): 2}.get((in_psum, tight), 1)
        elif r.opcode == "tensor_tensor":
            wide = [a for a in operands if a.free_size > 1]
            fast = all(a.dtype in HALF and a.inner_stride == a.itemsize for a in wide)
            columns *= 1 if fast or any(a.buffer == "psum" for a in wide) else 2
        columns *= TIMES.get(r.opcode, 1)
    columns = columns * (1 + any(far)) + (64 if len(r.writes) > 1 else 0)
    busy = (columns + 64) / ghz
    return busy, max(busy, columns / ghz + (290 if r.engine == "scalar" else 100 / ghz))


def dma_ns(r: Dma) -> tuple[float, float, int]:
    """(time over all engines, time of the busiest, descriptors)."""
    dst, src = r.writes[0], r.reads[0]
    assert not r.transpose, "none of our kernels transposes by DMA"
    total = max(dst.nbytes, src.nbytes)
    rows = next((a.shape[0] for a in (src, dst) if a.indirect), dst.shape[0])
    moved = 1 - r.skipped_rows / rows
    hbm = sum(a.nbytes for a in (src, dst) if a.buffer == "hbm") * moved / 358
    a, b = sorted((src.run_bytes, dst.run_bytes))
    piece = min(total, a if b % a == 0 else gcd(a, b))
    on_chip, engines = dst if dst.on_chip else src, 16
    if not on_chip.on_chip and total // piece < 16:
        piece = max(min(piece, 512), total // 16)
    elif on_chip.on_chip:
        engines = (on_chip.partition + on_chip.num_partitions - 1) // 8 - on_chip.partition // 8 + 1
    count = -(-total // piece)
    time = count * (9 + moved * piece / 24.5)
    return max(time / 16, hbm), max(time / min(engines, count), hbm), count


def second_us(launch: Launch) -> float:
    """The modelled time of a launch."""
    cores = [_Pass(launch.of_core(core)) for core in range(launch.num_cores)]
    passes = [core.run() for core in cores]
    arrived = [next(one) for one in passes]
    while max(arrived) >= 0:
        arrived = [one.send(max(arrived)) for one in passes]
    return max(t for core in cores for t in (*core.free.values(), *core.done.values())) / 1e3


class _Pass:
    """One pass over what a core executes."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.cells: dict[int, np.ndarray[Any, Any]] = {}
        """By storage, [3: written, by which engine (0 DMA), read until; partitions; cells]."""
        self.free, self.done, self.used = (defaultdict[Any, float](float) for _ in range(3))
        self.slow_until, self.table, self.trips = 0.0, "", [0]
        self.size: dict[int, int] = defaultdict(int)
        self.step: dict[int, int] = defaultdict(lambda: 128)
        """By storage: at which multiples of partitions its operands begin and end."""
        for r in records:
            for a in (*r.writes, *r.reads):
                stop = a.offset + sum((n - 1) * s for n, s in a.free_dims if s > 0) + a.itemsize
                self.size[a.storage] = max(self.size[a.storage], stop)
                rows = a.num_partitions if a.strides[:1] != (0,) else 1
                self.step[a.storage] = gcd(self.step[a.storage], a.partition, rows)

    def run(self) -> Generator[float, float]:
        """Yields when it arrives at each meeting, gets when it goes on; in the end -1."""
        for r in self.records:
            if isinstance(r, LoopMark):
                self.loop(r)
                continue
            issuer = self.issuer(r)
            at = max(self.ready(issuer, r, isinstance(r, Dma)), self.free[issuer])
            if r.opcode in ("core_barrier", "sendrecv"):
                at = (yield at) + (MEET_NS if r.opcode == "core_barrier" else 0)
            self.touch(r, *(self.transfer(r, at) if isinstance(r, Dma) else self.compute(r, at)))
        yield -1.0

    def issuer(self, r: Instruction) -> str:
        """The engine that executes or starts an instruction."""
        if not isinstance(r, Dma):
            return r.engine
        if r.dge_mode == "swdge" or any(a.indirect for a in (*r.writes, *r.reads)):
            return "gpsimd"
        return r.trigger or ("scalar" if r.writes[0].buffer == "hbm" else "sync")

    def where(self, a: Access) -> tuple[Any, Any]:
        """Cells of a storage, and those of an operand."""
        cells, size = self.cells.get(a.storage), CELL[a.buffer]
        if cells is None:
            shape = 3, 128 // self.step[a.storage], self.size[a.storage] // size + 1
            cells = self.cells[a.storage] = np.zeros(shape)
        if a.indirect or not a.num_elements:
            return cells, np.s_[:]
        starts, run = np.array([a.offset]), a.itemsize
        for n, step in sorted(a.free_dims, key=lambda d: abs(d[1])):
            if 0 <= step <= run:
                run += (n - 1) * step
            else:
                starts = (starts[:, None] + step * np.arange(n)).reshape(-1)
        touched = [np.arange(s // size, (s + run - 1) // size + 1) for s in starts]
        step, rows = self.step[a.storage], a.num_partitions if a.strides[0] else 1
        blocks = np.arange(a.partition // step, (a.partition + rows - 1) // step + 1)
        return cells, np.ix_(np.arange(3), blocks, np.unique(np.concatenate(touched)))

    def ready(self, engine: str, r: Instruction | LoopMark, dma: bool = False) -> float:
        """When the operands may be touched."""
        at, me = 0.0, -1 if dma else 1 + list(GHZ).index(engine)
        for a in (*r.reads, *r.writes):
            cells, where = self.where(a)
            written, by, read = cells[where]
            written = np.where((by == 0) | (by == me), written, written + HOP_NS[engine])
            if a not in r.reads:
                written = np.maximum(np.where(by == me, 0, written), read)
            at = max(at, float(written.max(initial=0)))
        return at

    def touch(self, r: Instruction, until: float, done: float) -> None:
        """Note when an instruction has read and written its operands."""
        is_dma = isinstance(r, Dma)
        by, hop = (0, 0.0) if is_dma else (1 + list(GHZ).index(r.engine), HOP_NS[r.engine])
        for a in (*r.reads, *r.writes):
            cells, where = self.where(a)
            touched = cells[where]
            if a in r.writes:
                touched[:2] = [[[done]], [[by]]]
            if a in r.reads:
                touched[2] = np.maximum(touched[2], until + hop)
            cells[where] = touched

    def loop(self, mark: LoopMark) -> None:
        """All engines meet; a trip, or a loop without one, costs its time."""
        if mark.edge == "begin":
            self.trips.append(0)
        self.trips[-1] += mark.edge == "iteration"
        pays = mark.edge == "iteration" or (mark.edge == "end" and not self.trips.pop())
        at = max(self.ready("vector", mark), *(max(self.free[e], self.done[e]) for e in GHZ))
        self.free.update(dict.fromkeys(GHZ, at + (TRIP_NS if pays else 0)))

    def compute(self, r: Instruction, at: float) -> tuple[float, float]:
        """(end, result) of an instruction of an engine."""
        busy, latency = compute_ns(r)
        if r.opcode.startswith("activation") and r.op not in (*ANY_TABLE, self.table):
            self.table, busy, latency = r.op, busy + TABLE_NS, latency + TABLE_NS
        tiled = isinstance(r, Matmul) and r.tile_size != (128, 128)
        if r.engine == "tensor":
            y, x = getattr(r, "tile_position", (0, 0))
            rows, columns = getattr(r, "tile_size", (128, 128))
            parts = [(i, j) for i in range(y, y + rows, 32) for j in range(x, x + columns, 32)]
            at = max(at, *(self.free[p] for p in parts))
            if at - self.done["array"] > RAMP_NS / 2 or not self.slow_until:
                self.slow_until = at + RAMP_NS
            if at < self.slow_until:
                busy, latency = 2 * busy, latency + busy
            self.free.update(dict.fromkeys(parts, at + busy))
            self.done["array"] = max(self.done["array"], at + busy)
        self.free[r.engine] = at if tiled else at + busy
        self.done[r.engine] = max(self.done[r.engine], at + latency)
        return at + busy, at + latency

    def transfer(self, r: Dma, at: float) -> tuple[float, float]:
        """(end, end) of a DMA."""
        issuer, (work, least, count) = self.issuer(r), dma_ns(r)
        each = 6 if any(a.indirect for a in (*r.writes, *r.reads)) else 1
        prepare = (150 + each * count) / 1.2 if issuer == "gpsimd" else 0.0
        self.free[issuer] = at + (prepare or (ISSUE_NS if issuer == "sync" else 64 / 1.2))
        first = end = at + prepare + FIRST_NS
        bucket = int(first / BUCKET_NS)
        while work > 1e-9:
            begin = max(first, bucket * BUCKET_NS)
            taken = min(work, (bucket + 1) * BUCKET_NS - begin, BUCKET_NS - self.used[bucket])
            self.used[bucket] += taken
            work, end, bucket = work - taken, begin + taken, bucket + 1
        done = max(end, first + least) + LAST_NS
        self.done["dma"] = max(self.done["dma"], done)
        return done, done
