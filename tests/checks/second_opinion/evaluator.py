"""Modelled time of a traced launch of one core, worked out a second time in another way.

The cost model plays events in order of time, with edges between instructions; this goes through
the trace once in program order and keeps, for every stretch of memory, when it was written and read
last. The rules are those of docs/decisions.md, written down here again, with base constants. The
DMA engines are one server with room in every quarter of a microsecond.
"""

from collections import defaultdict, deque
from math import gcd
from typing import Any

import numpy as np

from segattn.reference.nki.records import Access, Dma, Instruction, Launch, LoopMark, Matmul

GHZ = {"tensor": 2.4, "scalar": 1.2, "vector": 0.96, "gpsimd": 1.2, "sync": 1.2}
HOP_NS = {engine: 60 / GHZ["vector" if engine == "vector" else "scalar"] for engine in GHZ}
HOP_NS["tensor"] = 60 / 2.4
TRIP_NS, TABLE_NS, RAMP_NS, ISSUE_NS, FIRST_NS, LAST_NS = (
    9000.0,
    1280.0,
    3000.0,
    600.0,
    740.0,
    300.0,
)
HALF, ANY_TABLE = ("bfloat16", "float16"), ("", "copy", "square", "abs", "relu", "sign")
CELL, BUCKET_NS, SBUF_BYTES = {"sbuf": 4, "psum": 32, "hbm": 256, "register": 4}, 250.0, 208 * 1024


def tight(a: Access) -> bool:
    """Whether the elements of a partition lie side by side."""
    return a.inner_stride == a.itemsize


def compute_ns(r: Instruction) -> tuple[float, float]:
    """How long an instruction holds its engine, and until its result is there."""
    ghz, first = GHZ[r.engine], (*r.writes[:1], *r.reads[:1])
    if r.engine == "sync" or r.opcode.startswith("register_"):
        return 100.0, 100.0
    slow = (
        2 if any(abs(a.inner_stride) > 16 and a.free_size > 1 for a in r.reads if a.on_chip) else 1
    )
    if r.engine == "tensor":
        data, wide = r.reads[0], r.reads[-1]
        stationary, moving = data.free_size, data.num_partitions
        if isinstance(r, Matmul):
            moving, slow = r.N, 2 if abs(wide.inner_stride) > 16 and wide.free_size > 1 else 1
        passes = 4 if isinstance(r, Matmul) and not r.is_transpose else 2
        cycles = max(min(64, stationary), moving) * slow
        cycles *= passes if "float32" in (data.dtype, wide.dtype) else 1
        return cycles / ghz, (cycles + 64) / ghz
    if r.engine == "gpsimd":
        n = slow * max((a.free_size for a in (*r.writes, *r.reads)), default=0) + 150
        return n / ghz, (n + 150) / ghz
    columns: float = max(a.free_size for a in first)
    tiles = [a for a in (*r.writes, *r.reads) if a.on_chip and a.free_size > 1]
    psum = any(a.buffer == "psum" for a in tiles)
    half = all(a.dtype in HALF for a in first)
    if r.engine == "vector":
        if r.opcode in ("tensor_copy", "tensor_scalar") and half:
            in_psum = sum(a.buffer == "psum" for a in first)
            columns /= {(0, True): 4, (0, False): 2, (1, True): 2}.get(
                (in_psum, all(map(tight, first))), 1
            )
        elif r.opcode == "tensor_tensor":
            fast = all(a.dtype in HALF and tight(a) for a in tiles)
            columns *= 1 if psum or fast else 2
        elif r.opcode == "tensor_reduce" and r.op in ("add", "maximum") and half:
            columns /= 2
        elif r.opcode == "tensor_copy_predicated":
            columns *= 1 if psum else 2
        columns *= {"scalar_tensor_tensor": 2, "tensor_tensor_scan": 2, "reciprocal": 8}.get(
            r.opcode, 1
        )
    columns = columns * slow + (64 if len(r.writes) > 1 else 0)
    least = 600 if any(a.buffer == "register" for a in r.reads) else 64
    busy = max(columns + 64, least) / ghz
    return busy, max(busy, columns / ghz + (290 if r.engine == "scalar" else 100 / ghz))


def dma_ns(r: Dma) -> tuple[float, float, int]:
    """(time over all engines, time of the busiest, descriptors)."""
    dst, src = r.writes[0], r.reads[0]
    total = max(dst.nbytes, src.nbytes)
    rows = next((a.shape[0] for a in (src, dst) if a.indirect), dst.shape[0])
    moved = 1 - r.skipped_rows / rows if r.skipped_rows else 1.0
    hbm = sum(a.nbytes for a in (src, dst) if a.buffer == "hbm") * moved / 358
    if r.transpose and src.on_chip:
        return total / 16 / (0.36 * 23), total / 16 / (0.36 * 23), 1
    a, b = sorted((src.run_bytes, dst.run_bytes))
    piece = a if b % a == 0 else gcd(a, b)
    if r.transpose:
        piece = src.free_dims[-1][0] * src.itemsize if tight(src) else src.itemsize
    piece = max(src.itemsize, min(piece, total))
    on_chip, engines = dst if dst.on_chip else src, 16
    if not on_chip.on_chip and total // piece < 16:
        piece = max(min(piece, 512), total // 16)
    elif on_chip.on_chip and not r.transpose:
        engines = (on_chip.partition + on_chip.num_partitions - 1) // 8 - on_chip.partition // 8 + 1
    count = -(-total // piece)
    time = count * (9 + moved * piece / 24.5) / (0.9 if r.transpose else 1)
    return max(time / 16, hbm), max(time / min(engines, count), hbm), count


class Evaluator:
    """One pass over a launch."""

    def __init__(self, launch: Launch) -> None:
        self.records = launch.records
        assert launch.num_cores == 1
        self.cells: dict[int, np.ndarray[Any, Any]] = {}
        """By storage, [3: written, by which engine (0 DMA), read until; 8 partitions; cells]."""
        self.free: dict[Any, float] = defaultdict(float)
        self.done: dict[Any, float] = defaultdict(float)
        self.used: dict[Any, float] = defaultdict(float)
        self.owed = self.slow_until = 0.0
        self.table, self.trips = "", [0]
        self.ends: dict[int, float] = {}
        last: dict[int, int] = {}
        self.size: dict[int, int] = defaultdict(int)
        for i, r in enumerate(self.records):
            for a in (*r.writes, *r.reads):
                stop = a.offset + sum((n - 1) * s for n, s in a.free_dims if s > 0) + a.itemsize
                self.size[a.storage] = max(self.size[a.storage], stop)
                if a.buffer == "sbuf" and not a.tensor:
                    last[a.storage] = i
        placed = {
            a.storage for r in self.records for a in r.writes if a.tensor and a.buffer == "sbuf"
        }
        self.room = deque([(SBUF_BYTES - sum(self.size[s] for s in placed), 0.0)])
        self.dies: dict[int, list[int]] = defaultdict(list)
        for storage, i in last.items():
            self.dies[i].append(storage)

    def run(self) -> float:
        """Modelled us."""
        for i, r in enumerate(self.records):
            if isinstance(r, LoopMark):
                self.loop(r)
            else:
                until, done = self.transfer(r) if isinstance(r, Dma) else self.compute(r)
                self.touch(r, until, done)
            self.room.extend((self.size[s], self.ends[s]) for s in self.dies.get(i, ()))
        return max(*self.free.values(), *self.done.values()) / 1e3

    def where(self, a: Access) -> tuple[Any, Any]:
        """Cells of a storage, and those of an operand."""
        cells, size = self.cells.get(a.storage), CELL[a.buffer]
        if cells is None:
            shape = 3, 16 if a.on_chip else 1, self.size[a.storage] // size + 1
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
        first, rows = (a.partition, a.shape[0] if a.strides[0] else 1) if a.on_chip else (0, 1)
        blocks = np.arange(first // 8, (first + rows - 1) // 8 + 1)
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
            if a.buffer == "sbuf" and not a.tensor and a.storage not in self.ends:
                self.ends[a.storage], needed = 0.0, self.size[a.storage]
                while needed > 0 and self.room:
                    nbytes, since = self.room.popleft()
                    at, needed = max(at, since), needed - nbytes
                if needed < 0:
                    self.room.appendleft((-needed, since))
        return at

    def touch(self, r: Instruction, until: float, done: float) -> None:
        """Note when an instruction has read and written its operands."""
        by, hop = 0, 0.0
        if not isinstance(r, Dma):
            by, hop = 1 + list(GHZ).index(r.engine), HOP_NS[r.engine]
        for a in (*r.reads, *r.writes):
            cells, where = self.where(a)
            touched = cells[where]
            if a in r.writes:
                touched[:2] = [[[done]], [[by]]]
            if a in r.reads:
                touched[2] = np.maximum(touched[2], until + hop)
            cells[where] = touched
            if a.storage in self.ends:
                self.ends[a.storage] = max(self.ends[a.storage], done)

    def loop(self, mark: LoopMark) -> None:
        """All engines meet; a trip, or a loop without one, costs its time."""
        if mark.edge == "begin":
            self.trips.append(0)
        self.trips[-1] += mark.edge == "iteration"
        pays = mark.edge == "iteration" or (mark.edge == "end" and not self.trips.pop())
        at = max(self.ready("vector", mark), *(max(self.free[e], self.done[e]) for e in GHZ))
        self.free.update(dict.fromkeys(GHZ, at + (TRIP_NS if pays else 0)))

    def compute(self, r: Instruction) -> tuple[float, float]:
        """(end, result) of an instruction of an engine."""
        at = max(self.ready(r.engine, r), self.free[r.engine])
        busy, latency = compute_ns(r)
        if r.opcode.startswith("activation") and r.op not in (*ANY_TABLE, self.table):
            self.table, busy, latency = r.op, busy + TABLE_NS, latency + TABLE_NS
        tiled = isinstance(r, Matmul) and r.tile_size != (128, 128)
        if r.engine == "tensor":
            (y, x), (rows, columns) = (0, 0), (128, 128)
            if isinstance(r, Matmul):
                (y, x), (rows, columns) = r.tile_position, r.tile_size
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

    def transfer(self, r: Dma) -> tuple[float, float]:
        """(end, end) of a DMA."""
        indirect = any(a.indirect for a in (*r.writes, *r.reads))
        software = indirect or r.dge_mode == "swdge" or r.trigger == "gpsimd"
        issuer = r.trigger or ("scalar" if r.writes[0].buffer == "hbm" else "sync")
        issuer = "gpsimd" if software else issuer
        at = max(self.ready(issuer, r, True), self.free[issuer])
        work, least, count = dma_ns(r)
        prepare = (150 + (6 if indirect else 1) * count) / 1.2 if software else 0.0
        self.free[issuer] = at + (prepare or (ISSUE_NS if issuer == "sync" else 64 / 1.2))
        first = at + prepare + FIRST_NS
        # Queues take turns: each gets half of what another one has taken already, which pays later.
        work, self.owed = work + self.owed, 0.0
        bucket, end = int(first / BUCKET_NS), first
        while work > 1e-9:
            begin = max(first, bucket * BUCKET_NS)
            left = max(0.0, BUCKET_NS - self.used[bucket])
            own = max(0.0, BUCKET_NS / 2 - self.used[issuer, bucket])
            taken = min(work, (bucket + 1) * BUCKET_NS - begin, max(left, own))
            self.used[bucket] += taken
            self.used[issuer, bucket] += taken
            self.owed += max(0.0, taken - left)
            work, end, bucket = work - taken, begin + taken, bucket + 1
        done = max(end, first + least) + LAST_NS
        self.done["dma"] = max(self.done["dma"], done)
        return done, done
