"""Records of an instruction trace: what was executed, and the memory that each operand touches.

A record holds `Access` tuples, never tensors, so that a trace keeps no tile alive. Bytes,
contiguous runs and K/M/N are derived on demand.
"""

from dataclasses import dataclass, field
from math import prod
from types import CodeType
from typing import ClassVar, Literal, NamedTuple

Buffer = Literal["sbuf", "psum", "hbm", "register"]
Engine = Literal["tensor", "vector", "scalar", "gpsimd", "sync", "dma"]
LoopEdge = Literal["begin", "iteration", "end"]

WHOLE_ARRAY = (128, 128)
"""Tile size of a matmul that takes the whole PE array."""


class Access(NamedTuple):
    """Memory that one operand touches: a strided pattern in one storage.

    On chip, `shape[0]` counts partitions, `strides[0]` is the step between them (1, or 0 for a
    partition read by all lanes) and the other strides are bytes inside a partition. In HBM all
    strides are bytes. Tiles with an explicit address share the arena of their core as storage, so
    that overlap by address is seen; a tile without an address is a storage of its own.
    """

    storage: int
    """Serial number of the arena or of the allocation, never reused within a process."""
    buffer: Buffer
    dtype: str
    itemsize: int
    offset: int
    """Byte address of the first element: inside its partition on chip, inside the tensor in HBM."""
    partition: int
    """First partition; 0 in HBM."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    indirect: bool = False
    """Rows (`shape[0]`) are chosen at run time: any byte of the storage may be touched."""
    tensor: int = 0
    """Serial number of the tile where the storage holds several: an arena, all of PSUM."""

    @property
    def on_chip(self) -> bool:
        """Whether dimension 0 is the partition dimension."""
        return self.buffer in ("sbuf", "psum")

    @property
    def num_partitions(self) -> int:
        """Partitions touched; 1 in HBM."""
        return self.shape[0] if self.on_chip else 1

    @property
    def num_elements(self) -> int:
        """Elements touched, repeated reads through stride 0 included."""
        return prod(self.shape)

    @property
    def free_size(self) -> int:
        """Elements per partition on chip; all elements in HBM."""
        return prod(self.shape[1:]) if self.on_chip else prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes touched, repeated reads included."""
        return self.num_elements * self.itemsize

    @property
    def free_dims(self) -> tuple[tuple[int, int], ...]:
        """(size, byte stride) of the dimensions inside a partition, outermost first, without
        those of size 1.
        """
        first = 1 if self.on_chip else 0
        dims = zip(self.shape[first:], self.strides[first:], strict=True)
        return tuple((n, s) for n, s in dims if n != 1)

    @property
    def run_bytes(self) -> int:
        """Length in bytes of a contiguous run, at least one element: what one descriptor covers.

        An indirect dimension ends a run: its rows lie anywhere.
        """
        dims = self.free_dims
        if self.indirect and not self.on_chip and self.shape[0] != 1:
            dims = dims[1:]
        run = self.itemsize
        for size, stride in reversed(dims):
            if stride != run:
                break
            run *= size
        return run

    @property
    def inner_stride(self) -> int:
        """Byte step between neighbouring elements of the innermost free dimension."""
        dims = self.free_dims
        return dims[-1][1] if dims else self.itemsize


@dataclass(slots=True)
class Instruction:
    """One executed instruction of a compute engine, or a register or query instruction."""

    engine: Engine
    opcode: str
    """Name of the `nki.isa` function."""
    core: int
    writes: tuple[Access, ...]
    reads: tuple[Access, ...]
    op: str
    """Activation function or ALU operator; "" when the opcode says it all."""
    iteration: tuple[int, ...]
    """Iteration numbers of the open dynamic loops, outermost first."""
    code: CodeType
    line: int

    @property
    def source(self) -> tuple[str, int]:
        """File and line of the kernel statement."""
        return self.code.co_filename, self.line


@dataclass(slots=True)
class Matmul(Instruction):
    """`nc_matmul`: reads are (stationary [K, M], moving [K, N]), the write is [M, N]."""

    perf_mode: str
    is_transpose: bool
    tile_position: tuple[int, int]
    tile_size: tuple[int, int]
    """First row and column, and rows and columns, of the PE array in use; (128, 128) untiled."""

    @property
    def K(self) -> int:
        """Contraction rows."""
        return self.reads[1].num_partitions

    @property
    def M(self) -> int:
        """Columns of the stationary operand."""
        return self.reads[0].free_size

    @property
    def N(self) -> int:
        """Columns of the moving operand, streamed one per cycle."""
        return self.reads[1].free_size


@dataclass(slots=True)
class Dma(Instruction):
    """`dma_copy`, `dma_transpose`, `dma_compute`, `sendrecv`.

    `writes[0]` and `reads[0]` are the moved data (`dma_compute`: every source comes first in
    `reads`); index tiles and offset registers follow in `reads`.
    """

    trigger: str
    """Engine that issues it when the kernel says so ("sync", "scalar", "gpsimd"), else ""."""
    dge_mode: str
    """"none", "swdge", "hwdge" or "unknown"."""
    transpose: bool
    skipped_rows: int
    """Indirect rows left out because their index was out of range."""


@dataclass(slots=True)
class LoopMark:
    """Edge of a dynamic loop: "begin" (reads its trip count), "iteration" (before each), "end"."""

    edge: LoopEdge
    core: int
    reads: tuple[Access, ...]
    iteration: tuple[int, ...]
    code: CodeType
    line: int

    writes: ClassVar[tuple[Access, ...]] = ()

    @property
    def opcode(self) -> str:
        """Shown in reports."""
        return f"loop {self.edge}"

    @property
    def source(self) -> tuple[str, int]:
        """File and line of the loop statement."""
        return self.code.co_filename, self.line


Record = Instruction | LoopMark


@dataclass(slots=True)
class Launch:
    """Records of one kernel launch."""

    kernel: str
    num_cores: int
    records: list[Record] = field(default_factory=list)

    def of_core(self, core: int) -> list[Record]:
        """Records of one physical core, in its program order."""
        return [record for record in self.records if record.core == core]
