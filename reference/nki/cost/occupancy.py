"""How long one instruction keeps its compute engine busy, and when its result is there.

Rules of thumb per instruction, N = elements per partition; the number of partitions does not
matter. Sources: the architecture guides of Trainium and Trainium2, the cost notes of earlier
`nki.isa` references, fitted where `constants.py` says so.
"""

from dataclasses import dataclass

from ..records import Access, Instruction, Matmul
from .constants import CostConstants

_HALF = frozenset({"bfloat16", "float16"})
_STRIDE_LIMIT_BYTES = 16
_FP32_BANK_COLUMNS = 512

_PER_ELEMENT_TABLES = frozenset({"", "copy", "square", "abs", "relu", "sign"})
"""Functions taken to be in every activation table (assumed): they never cause a load."""

_TWO_INPUT = frozenset({"scalar_tensor_tensor", "tensor_tensor_scan"})


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Cost of one instruction, in ns."""

    busy: float
    """Until the engine can start its next instruction."""
    latency: float
    """Until a dependent instruction can read the result; at least `busy`."""
    shares_port: bool = False
    """Uses the SBUF port that fast Vector Engine modes and GpSimd share."""
    table: str = ""
    """Activation function that must be loaded; "" when any table will do."""


def _elements(instruction: Instruction) -> int:
    return max(a.free_size for a in (*instruction.writes[:1], *instruction.reads[:1]))


def _contiguous(access: Access) -> bool:
    return access.inner_stride == access.itemsize


def _strided_source(instruction: Instruction) -> bool:
    return any(
        abs(a.inner_stride) > _STRIDE_LIMIT_BYTES and a.free_size > 1
        for a in instruction.reads
        if a.on_chip
    )


def _tiles(instruction: Instruction) -> list[Access]:
    """Operands that stream, without per-partition scalars and registers."""
    operands = (*instruction.writes, *instruction.reads)
    return [a for a in operands if a.on_chip and a.free_size > 1]


def _one_input_speedup(instruction: Instruction) -> int:
    """Speed-up of tensor_copy and tensor_scalar on 16-bit data: 4, 2 or 1."""
    data = [*instruction.writes[:1], *instruction.reads[:1]]
    if not all(a.dtype in _HALF for a in data):
        return 1
    contiguous = all(_contiguous(a) for a in data)
    in_psum = sum(a.buffer == "psum" for a in data)
    if in_psum == 0:
        return 4 if contiguous else 2
    return 2 if contiguous and in_psum == 1 else 1


def _vector_cycles(instruction: Instruction) -> tuple[float, bool]:
    """(cycles that grow with the size, whether a fast mode is used)."""
    n = _elements(instruction)
    opcode = instruction.opcode
    tiles = _tiles(instruction)
    all_half = bool(tiles) and all(a.dtype in _HALF for a in tiles)
    any_psum = any(a.buffer == "psum" for a in tiles)
    if opcode in ("tensor_copy", "tensor_scalar"):
        speedup = _one_input_speedup(instruction)
        return n / speedup, speedup > 1
    if opcode == "tensor_tensor":
        fast = all_half and not any_psum and all(_contiguous(a) for a in tiles)
        return (n if fast or any_psum else 2 * n), fast
    if opcode == "tensor_copy_predicated":
        return (n if any_psum else 2 * n), False
    if opcode in _TWO_INPUT:
        return 2 * n, False
    if opcode == "tensor_reduce":
        data = [*instruction.writes[:1], *instruction.reads[:1]]
        fast = instruction.op in ("add", "maximum") and all(a.dtype in _HALF for a in data)
        return (n / 2 if fast else n), fast
    if opcode == "reciprocal":
        return 8 * n, False
    if opcode == "bn_aggr":
        return 13 * n / 3, False
    return n, False


def _reads_accumulator(instruction: Instruction) -> bool:
    """Whether a reduction register is read out into a second destination."""
    return len(instruction.writes) > 1


def _gpsimd_cycles(instruction: Instruction) -> float:
    if instruction.opcode == "topk":
        return 4 * instruction.reads[0].free_size + instruction.writes[0].free_size
    return max((a.free_size for a in (*instruction.writes, *instruction.reads)), default=0)


def matmul_cycles(instruction: Instruction, c: CostConstants) -> float:
    """PE cycles of `nc_matmul` or of `nc_transpose` on the Tensor Engine.

    max(min(64, stationary columns), moving columns), four times for fp32; the stationary load
    runs behind the previous multiply. `double_row` contracts 256 fp8 rows in the same time.
    """
    data = instruction.reads[0]
    if isinstance(instruction, Matmul):
        stationary, moving, wide = instruction.M, instruction.N, instruction.reads[1]
        passes = c.fp32_transpose_passes if instruction.is_transpose else c.fp32_matmul_passes
        if instruction.perf_mode.startswith("double_row"):
            # Both operands carry two contraction rows per partition.
            stationary, moving = stationary // 2, moving // 2
    else:
        # The identity [P, P] moves past the data [P, F].
        stationary, moving, wide = data.free_size, data.num_partitions, data
        passes = c.fp32_transpose_passes
    cycles: float = max(min(c.tensor_min_cycles, stationary), moving)
    if abs(wide.inner_stride) > _STRIDE_LIMIT_BYTES and wide.free_size > 1:
        cycles *= 2
    if "float32" in (data.dtype, wide.dtype):
        cycles *= passes
    return cycles + c.tensor_overhead_cycles


def occupancy(instruction: Instruction, c: CostConstants) -> Occupancy:
    """Cost of an instruction of a compute engine or of a sequencer; DMA is in `dma.py`."""
    engine = instruction.engine
    if engine == "tensor":
        busy = matmul_cycles(instruction, c) / c.tensor_ghz
        return Occupancy(busy, busy + c.tensor_pipe_cycles / c.tensor_ghz)
    if instruction.opcode == "core_barrier":
        return Occupancy(0.0, 0.0)
    if engine == "sync" or instruction.opcode.startswith("register_"):
        return Occupancy(c.register_ns, c.register_ns)
    ghz = c.ghz(engine)
    slow = 2 if _strided_source(instruction) else 1
    dynamic = any(a.buffer == "register" for a in instruction.reads)
    extra = c.accumulator_read_cycles if _reads_accumulator(instruction) else 0.0
    if engine == "gpsimd":
        stream, fast = _gpsimd_cycles(instruction) * slow, True
        busy = stream + c.gpsimd_overhead_cycles
        latency = busy + c.gpsimd_pipe_cycles
    elif engine == "scalar":
        stream, fast = _elements(instruction) * slow + extra, False
        busy = stream + c.scalar_overhead_cycles
        latency = stream + c.scalar_latency_ns * ghz
    else:
        stream, fast = _vector_cycles(instruction)
        stream = stream * slow + extra
        busy = stream + c.vector_overhead_cycles
        latency = stream + c.vector_latency_cycles
    busy = max(busy, c.dynamic_address_cycles if dynamic else c.min_cycles)
    table = instruction.op if instruction.opcode.startswith("activation") else ""
    return Occupancy(
        busy / ghz,
        max(busy, latency) / ghz,
        fast,
        "" if table in _PER_ELEMENT_TABLES else table,
    )
