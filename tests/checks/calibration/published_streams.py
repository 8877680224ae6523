"""Instruction streams of the published profiles that the cost model is checked against.

Each function rebuilds the instructions of one public kernel or figure, with its buffers and its
order, from its description; sources are in `calibration.py`.
"""

from collections.abc import Callable
from functools import cache

from segattn.reference.nki.cost.constants import BASE
from segattn.reference.nki.cost.result import CostResult
from segattn.reference.nki.records import Access
from segattn.tests.checks.calibration.streams import Stream, bank, hbm, part, tile

FP32 = "float32"
M, N, K = 4096, 8192, 8192
"""Sizes of the fp32 matmul tutorial: [M, K] @ [K, N]."""

_M_TILES, _N_TILES, _K_TILES = M // 128, N // 512, K // 128


UNBOUNDED = BASE.with_measured({"sbuf_bytes": 1 << 20})
"""For the blocked matmuls, whose blocks do not fit in SBUF twice, the first one not even once: what
the compiler made of them is not published, but the profiles show that loads were hidden."""


def _evict(stream: Stream, psum: Access, out: Access) -> None:
    result = tile(128, 512, FP32)
    stream.compute("vector", "tensor_copy", 0, (result,), (psum,))
    stream.load(out, result)


def matmul_naive(trips: int) -> CostResult:
    """Both operand tiles are loaded again for every matmul, all through one software queue."""
    stream = Stream()
    lhs, rhs, out = hbm(128, 128, FP32), hbm(128, 512, FP32), hbm(128, 512, FP32)
    for _ in range(trips * _N_TILES):
        psum = bank(128, 512)
        for _ in range(_K_TILES):
            a, b = tile(128, 128, FP32), tile(128, 512, FP32)
            stream.load(a, lhs, "gpsimd")
            stream.load(b, rhs, "gpsimd")
            stream.matmul(0, psum, a, b)
        _evict(stream, psum, out)
    return stream.evaluate()


def matmul_hoisted(trips: int) -> CostResult:
    """The stationary tiles are loaded once per row of tiles, the moving ones for every matmul."""
    stream = Stream()
    lhs, rhs, out = hbm(128, 128, FP32), hbm(128, 512, FP32), hbm(128, 512, FP32)
    for _ in range(trips):
        rows = [tile(128, 128, FP32) for _ in range(_K_TILES)]
        for a in rows:
            stream.load(a, lhs)
        for _ in range(_N_TILES):
            psum = bank(128, 512)
            for a in rows:
                b = tile(128, 512, FP32)
                stream.load(b, rhs)
                stream.matmul(0, psum, a, b)
            _evict(stream, psum, out)
    return stream.evaluate()


def matmul_blocked(trips: int) -> CostResult:
    """Blocks of 256 rows and 1024 columns, all of K resident for a block."""
    stream = Stream()
    lhs, rhs, out = hbm(128, 256, FP32), hbm(128, 1024, FP32), hbm(128, 512, FP32)
    for _ in range(trips):
        rows = [tile(128, 256, FP32) for _ in range(_K_TILES)]
        for a in rows:
            stream.load(a, lhs)
        for _ in range(_N_TILES // 2):
            columns = [tile(128, 1024, FP32) for _ in range(_K_TILES)]
            for b in columns:
                stream.load(b, rhs)
            for i in range(4):
                psum = bank(128, 512)
                for a, b in zip(rows, columns, strict=True):
                    half = slice(i % 2 * 512, i % 2 * 512 + 512)
                    quarter = slice(i // 2 * 128, i // 2 * 128 + 128)
                    stream.matmul(0, psum, part(a, quarter), part(b, half))
                _evict(stream, psum, out)
    return stream.evaluate(UNBOUNDED)


def matmul_k_blocked(trips: int) -> CostResult:
    """Blocks of 2048 x 1024 x 1024; partial sums of a block are added up in SBUF."""
    stream = Stream()
    lhs, rhs, out = hbm(128, 2048, FP32), hbm(128, 1024, FP32), hbm(128, 1024, FP32)
    for _ in range(trips):
        sums = [[tile(128, 1024, FP32) for _ in range(16)] for _ in range(M // 2048)]
        halves = [[part(s, slice(h, h + 512)) for s in block for h in (0, 512)] for block in sums]
        for half in (h for block in halves for h in block):
            stream.compute("vector", "memset", 0, (half,), ())
        for _ in range(K // 1024):
            columns = [tile(128, 1024, FP32) for _ in range(8)]
            for b in columns:
                stream.load(b, rhs)
            for block in halves:
                rows = [tile(128, 2048, FP32) for _ in range(8)]
                for a in rows:
                    stream.load(a, lhs)
                for i, half in enumerate(block):
                    psum = bank(128, 512)
                    for a, b in zip(rows, columns, strict=True):
                        stationary = part(a, slice(i // 2 * 128, i // 2 * 128 + 128))
                        moving = part(b, slice(i % 2 * 512, i % 2 * 512 + 512))
                        stream.matmul(0, psum, stationary, moving)
                    stream.compute("vector", "tensor_tensor", 0, (half,), (psum, half), "add")
        for block, parts in zip(sums, halves, strict=True):
            results = [tile(128, 1024, FP32) for _ in block]
            for i, half in enumerate(parts):
                result = part(results[i // 2], slice(i % 2 * 512, i % 2 * 512 + 512))
                stream.compute("vector", "tensor_copy", 0, (result,), (half,))
            for result in results:
                stream.load(out, result)
    return stream.evaluate(UNBOUNDED)


TRIPS: dict[Callable[[int], CostResult], int] = {
    matmul_naive: _M_TILES,
    matmul_hoisted: _M_TILES,
    matmul_blocked: _M_TILES // 2,
    matmul_k_blocked: N // 1024,
}
"""Trips of the outermost loop of the whole kernel."""


@cache
def whole(kernel: Callable[[int], CostResult], quantity: Callable[[CostResult], float]) -> float:
    """A quantity of a whole matmul kernel, which is linear in the trips of its outermost loop:
    from runs of one and of two trips.
    """
    one, two = (quantity(_run(kernel, trips)) for trips in (1, 2))
    return one + (two - one) * (TRIPS[kernel] - 1)


@cache
def _run(kernel: Callable[[int], CostResult], trips: int) -> CostResult:
    return kernel(trips)


def one_dma(dst: Access, src: Access, trigger: str = "") -> CostResult:
    """A single DMA instruction."""
    stream = Stream()
    stream.load(dst, src, trigger)
    return stream.evaluate()


def dma_rate(bytes_per_partition: int, issue_ns: float) -> float:
    """Steady rate in B/ns of DMAs of 128 partitions on one queue."""
    ends = []
    for number in (8, 24):
        stream = Stream()
        for _ in range(number):
            columns = bytes_per_partition // 4
            stream.load(tile(128, columns, FP32), hbm(128, columns, FP32), "sync")
        constants = BASE.with_measured({"dma_issue_ns": issue_ns})
        ends.append(stream.evaluate(constants).modelled_ns)
    return 16 * 128 * bytes_per_partition / (ends[1] - ends[0])


def dependent_vector_chain() -> CostResult:
    """32 rounds of five dependent fp32 operations on two inputs [128, 512], at the trn1 clock."""
    stream = Stream()
    x = tile(128, 512, FP32)
    for _ in range(32 * 5):
        y = tile(128, 512, FP32)
        stream.compute("vector", "tensor_tensor", 0, (y,), (x, tile(128, 512, FP32)), "multiply")
        x = y
    return stream.evaluate(BASE.with_measured({"vector_ghz": 1.12}))


def double_row_matmul() -> CostResult:
    """fp8 matmul 512 x 16384 x 1024 with 256 contraction rows per instruction."""
    fp8 = "float8_e4m3"
    stream = Stream()
    rows = [tile(128, 2 * 512, fp8) for _ in range(64)]
    columns = [tile(128, 2 * 1024, fp8) for _ in range(64)]
    for a, b in zip(rows, columns, strict=True):
        stream.load(a, hbm(128, 2 * 512, fp8))
        stream.load(b, hbm(128, 2 * 1024, fp8))
    for m in range(4):
        for n in range(2):
            psum = bank(128, 512)
            for a, b in zip(rows, columns, strict=True):
                stationary = part(a, slice(m * 256, m * 256 + 256))
                moving = part(b, slice(n * 1024, n * 1024 + 1024))
                stream.matmul(0, psum, stationary, moving, "double_row")
            _evict(stream, psum, hbm(128, 512, FP32))
    return stream.evaluate()


def isolated_exp() -> CostResult:
    """One exp [128, 128] with its table load."""
    stream = Stream()
    stream.compute("scalar", "activation", 0, (tile(128, 128),), (bank(128, 128),), "exp")
    return stream.evaluate()
