"""Hand-built instruction streams: programs for the cost model that need no kernel and no data."""

from itertools import count

from segattn.reference.nki.cost.constants import BASE, CostConstants
from segattn.reference.nki.cost.result import CostResult, evaluate
from segattn.reference.nki.trace import Access, Trace

ITEMSIZE = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}
PSUM_BANK_BYTES = 2048

_serial = count(1)


def tile(partitions: int, columns: int, dtype: str = "bfloat16", start: int = 0) -> Access:
    """A new SBUF tile [partitions, columns], contiguous, a storage of its own."""
    size = ITEMSIZE[dtype]
    return Access(next(_serial), "sbuf", dtype, size, 0, start, (partitions, columns), (1, size))


def bank(partitions: int, columns: int, dtype: str = "float32") -> Access:
    """A new PSUM tile [partitions, columns], from the first byte of a bank."""
    return tile(partitions, columns, dtype)._replace(buffer="psum")


def hbm(rows: int, columns: int, dtype: str = "bfloat16") -> Access:
    """A new HBM tensor [rows, columns], row-major."""
    size = ITEMSIZE[dtype]
    strides = (columns * size, size)
    return Access(next(_serial), "hbm", dtype, size, 0, 0, (rows, columns), strides)


def part(access: Access, columns: slice | None = None, rows: slice | None = None) -> Access:
    """Columns and rows (partitions on chip) of a two-dimensional tile or tensor."""
    num_rows, num_columns = access.shape
    row_step, column_step = access.strides
    r0, r1, _ = (rows or slice(None)).indices(num_rows)
    c0, c1, step = (columns or slice(None)).indices(num_columns)
    shape = (r1 - r0, len(range(c0, c1, step)))
    on_chip = access.on_chip
    return access._replace(
        offset=access.offset + c0 * column_step + (0 if on_chip else r0 * row_step),
        partition=access.partition + (r0 if on_chip else 0),
        shape=shape,
        strides=(row_step, column_step * step),
    )


class Stream(Trace):
    """A trace of one launch that is written by hand, one call per instruction."""

    def __init__(self, num_cores: int = 1) -> None:
        """Open the launch."""
        super().__init__()
        self.launch("stream", num_cores)

    def load(self, dst: Access, src: Access, trigger: str = "", core: int = 0) -> None:
        """A plain DMA copy in any direction."""
        mode = {"": "unknown", "gpsimd": "swdge"}.get(trigger, "hwdge")
        self.dma("dma_copy", core, (dst,), (src,), trigger, mode)

    def evaluate(self, constants: CostConstants = BASE) -> CostResult:
        """Model the stream."""
        return evaluate(self.launches[0], constants)
