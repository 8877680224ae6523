"""The sheet of microbenchmarks, in order of leverage: one experiment per open question.

An experiment runs one kernel at several points, each with two repetition counts; the difference
gives the time of one repetition free of launch and set-up. `fit` turns these times into constants
of the cost model. Where the times come from is the caller's business: a device, or (to test the
sheet itself) the cost model, from which the fit must recover the constants it was given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from segattn.reference.nki.cost.constants import BASE

Array = NDArray[Any]
Arguments = dict[str, Any]
Times = Mapping[int, float]
"""Point -> ns per repetition."""

KERNELS = "benchmarks.microbenchmarks.micro_kernels_nki"
_BF16 = np.dtype(ml_dtypes.bfloat16)


def _no_answers(times: Times) -> dict[str, bool]:
    return {}


@dataclass(frozen=True)
class Experiment:
    """One question to the hardware."""

    name: str
    question: str
    kernel: str
    """Function in `micro_kernels_nki`."""
    points: tuple[int, ...]
    counts: tuple[int, int]
    """Repetitions of the short and of the long run."""
    arguments: Callable[[int, int], Arguments]
    """Arguments of the kernel for (point, repetitions)."""
    fit: Callable[[Times], dict[str, float]]
    """Constants of the cost model from the times."""
    answers: Callable[[Times], dict[str, bool]] = _no_answers
    """What the times say where the model has no constant for it."""
    device_only: bool = False
    """Too long to interpret."""

    def per_repetition(self, ns: Callable[[Arguments], float]) -> dict[int, float]:
        """Time of one repetition at each point; `ns` times the kernel on some arguments."""
        short, long = self.counts
        return {
            point: (ns(self.arguments(point, long)) - ns(self.arguments(point, short)))
            / (long - short)
            for point in self.points
        }


def _rows(columns: int, dtype: Any = np.float32, num_rows: int = 128) -> Array:
    values = np.random.default_rng(0).standard_normal((num_rows, columns), np.float32)
    return values.astype(dtype)


def _gather(columns: int, skipped: bool = False) -> dict[str, Any]:
    index = np.random.default_rng(0).permutation(256)[:128].astype(np.int32)[:, None]
    if skipped:
        index[::2] = -1
    return {"rows": _rows(columns, _BF16, 256), "index": index}


def trip_count(count: int) -> Array:
    """The end of a dynamic loop, [1, 1] int32."""
    return np.array([[count]], np.int32)


def _overhead_cycles(times: Times, ghz: float) -> float:
    """Cycles beyond the columns, averaged over the points (columns)."""
    return max(0.0, float(np.mean([ns * ghz - columns for columns, ns in times.items()])))


def _fit_exp(times: Times) -> dict[str, float]:
    return {"scalar_overhead_cycles": _overhead_cycles(times, BASE.scalar_ghz)}


def _fit_matmul(times: Times) -> dict[str, float]:
    wide = {columns: ns for columns, ns in times.items() if columns > BASE.tensor_min_cycles}
    return {"tensor_overhead_cycles": _overhead_cycles(wide, BASE.tensor_ghz)}


def _fit_vector(times: Times) -> dict[str, float]:
    return {"vector_overhead_cycles": _overhead_cycles(times, BASE.vector_ghz)}


def _fit_chip_transpose(times: Times) -> dict[str, float]:
    documented = 16 * BASE.dma_documented_engine_rate
    return {"dma_transpose_sbuf": 128 * 512 * _BF16.itemsize / times[512] / documented}


def _fit_gather(times: Times) -> dict[str, float]:
    """GpSimd prepares 128 descriptors; the narrowest rows are not bound by their bytes."""
    cycles = times[min(times)] * BASE.gpsimd_ghz - BASE.gather_pool_cycles
    return {"gather_descriptor_cycles": max(0.0, cycles / 128)}


def _fit_load(times: Times) -> dict[str, float]:
    smallest, widest = min(times), max(times)
    moved = 128 * widest * _BF16.itemsize
    return {"dma_issue_ns": times[smallest], "hbm_rate": moved / times[widest]}


def _fit_loop(times: Times) -> dict[str, float]:
    body = (64 + BASE.vector_latency_cycles) / BASE.vector_ghz
    return {"loop_iteration_ns": max(0.0, times[0] - body)}


def _nothing(times: Times) -> dict[str, float]:
    return {}


def _row_tile_answers(times: Times) -> dict[str, bool]:
    return {"row_tiles_run_side_by_side": times[512] < 0.75 * 512 / BASE.tensor_ghz}


def _loop_load_answers(times: Times) -> dict[str, bool]:
    """Points: 0 neither, 1 loads, 2 computes, 3 both; half of the shorter must be hidden."""
    load, compute, both = (times[point] - times[0] for point in (1, 2, 3))
    return {"loads_overlap_loop_edges": both < load + compute - min(load, compute) / 2}


def _transpose_load_answers(times: Times) -> dict[str, bool]:
    """Points: 1 transposes, 2 loads, 3 both."""
    free = times[3] < times[1] + times[2] - min(times[1], times[2]) / 2
    return {"dma_transposes_leave_loads_their_rate": free}


def _sustained_answers(times: Times) -> dict[str, bool]:
    """Points: trips. 5 % are more than the loop's edges can explain."""
    short, long = (times[trips] / trips for trips in sorted(times))
    return {"sustained_matmuls_are_throttled": long > 1.05 * short}


SHEET: tuple[Experiment, ...] = (
    Experiment(
        "exp",
        "cycles of an independent exp PSUM -> SBUF beyond its columns (ceiling at head_dim 128: "
        "96 % if 64; trn1 took 76 to 91)",
        "exp_kernel",
        (128, 256, 384, 512),
        (64, 256),
        lambda columns, n: {"x": np.zeros((128, 1), np.float32), "repeats": n, "columns": columns},
        _fit_exp,
    ),
    Experiment(
        "matmul",
        "is the load of the stationary tile hidden behind 129 (65) moving columns?",
        "matmul_kernel",
        (65, 129, 512),
        (128, 1024),
        lambda columns, n: {"x": _rows(768, _BF16), "repeats": n, "columns": columns},
        _fit_matmul,
    ),
    Experiment(
        "chip_transpose",
        "rate of a DMA transpose within SBUF, which bounds the public kernel",
        "chip_transpose_kernel",
        (512,),
        (32, 128),
        lambda columns, n: {"x": _rows(columns, _BF16), "repeats": n},
        _fit_chip_transpose,
    ),
    Experiment(
        "transpose_load",
        "do DMA transposes (1) take time from loads of four times their bytes (2), together (3)?",
        "transpose_load_kernel",
        (1, 2, 3),
        (32, 128),
        lambda point, n: {
            "x": _rows(2048, _BF16),
            "repeats": n,
            "transposes": point != 2,
            "loads": point != 1,
        },
        _nothing,
        _transpose_load_answers,
    ),
    Experiment(
        "gather_transpose",
        "2048 gathered rows of 128 bf16 that land transposed: how K can come in",
        "gather_transpose_kernel",
        (128,),
        (16, 48),
        lambda columns, n: {
            "rows": _rows(columns, _BF16, 4096),
            "index": np.random.default_rng(0)
            .permutation(4096)[:2048]
            .reshape(128, 16)
            .astype(np.uint32),
            "repeats": n,
        },
        _nothing,
    ),
    Experiment(
        "load",
        "issue interval of one hardware queue (64 columns) and the HBM rate (8192 columns)",
        "load_kernel",
        (64, 512, 1024, 2048, 8192),
        (32, 128),
        lambda columns, n: {"rows": _rows(columns, _BF16), "repeats": n, "width": columns},
        _fit_load,
    ),
    Experiment(
        "gather",
        "time of a gather of 128 rows against the row size: GpSimd, issue or bandwidth bound",
        "gather_kernel",
        (128, 512, 2048),
        (32, 128),
        lambda columns, n: {**_gather(columns), "repeats": n},
        _fit_gather,
    ),
    Experiment(
        "gather_skip",
        "does a skipped row (-1) cost a descriptor slot? Compare with gather",
        "gather_kernel",
        (128, 512, 2048),
        (32, 128),
        lambda columns, n: {**_gather(columns, skipped=True), "repeats": n},
        _nothing,
    ),
    Experiment(
        "loop",
        "time of a trip of a dynamic loop beyond its body",
        "loop_kernel",
        (0,),
        (8, 72),
        lambda _, n: {"x": _rows(64), "trips": trip_count(n)},
        _fit_loop,
    ),
    Experiment(
        "loop_skip",
        "does a gather in a dynamic loop compile, and one that skips rows (1), as decode does?",
        "loop_skip_kernel",
        (0, 1),
        (8, 72),
        lambda point, n: {**_gather(512, point > 0), "trips": trip_count(n), "skips": point > 0},
        _nothing,
    ),
    Experiment(
        "loop_load",
        "do loads go on over the edges of a dynamic loop? Neither (0), loads (1), sums (2), both",
        "loop_load_kernel",
        (0, 1, 2, 3),
        (8, 72),
        lambda point, n: {
            "rows": _rows(4096, _BF16),
            "x": _rows(512),
            "trips": trip_count(n),
            "loads": point in (1, 3),
            "computes": point in (2, 3),
        },
        _nothing,
        _loop_load_answers,
    ),
    Experiment(
        "row_tiles",
        "do two matmuls of 64 rows run side by side? Half the time of matmul 512 if so",
        "row_tiles_kernel",
        (512,),
        (128, 512),
        lambda columns, n: {"x": _rows(640, _BF16), "repeats": n, "columns": columns},
        _nothing,
        _row_tile_answers,
    ),
    Experiment(
        "evict",
        "cycles of an fp32 addition PSUM + SBUF beyond its columns",
        "vector_add_kernel",
        (129, 512),
        (64, 256),
        lambda columns, n: {"x": _rows(512), "repeats": n, "columns": columns},
        _fit_vector,
    ),
    Experiment(
        "sustained",
        "does the Tensor Engine keep its clock? Trips of 64 matmuls, 8 and 20000 (0.3 s)",
        "sustained_matmul_kernel",
        (8, 20000),
        (1, 3),
        lambda trips, n: {"x": _rows(768, _BF16), "trips": trip_count(trips * n)},
        _nothing,
        _sustained_answers,
        device_only=True,
    ),
)
"""All experiments on times; questions of values are in `microbenchmark_findings`."""
