"""Published measurements of Trainium against the cost model.

`python -m segattn.tests.checks.calibration` prints the table and ends with 1 when a row misses.

Rows of kind "check" used no parameter that was tuned on them; "fit" rows set a constant; "bound"
rows must stay below a published limit. All numbers of the model are modelled.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from segattn.reference.nki.cost.constants import BASE
from segattn.reference.nki.cost.result import CostResult
from segattn.tests.checks.calibration import published_streams as streams
from segattn.tests.checks.calibration import rates
from segattn.tests.checks.calibration.attention import causal_ns, dense_ns
from segattn.tests.checks.calibration.streams import hbm, tile

MATMUL = "NKI kernel optimisation tutorial, fp32 4096x8192x8192 on trn2"
DMA = "NKI DMA overview, profile figures"
DENSE = "third party on trn2: attention_cte, dense, head_dim 128 bf16, LNC2"
CAUSAL = "third party on trn2: attention_cte, causal, 16 heads, head_dim 128, one core"
RATES = "third party on trn2 or trn1"
MAMBA = "fused Mamba tutorial on trn1"


@dataclass(frozen=True)
class Row:
    """One published number, what the model says, and how far it may be off."""

    name: str
    what: str
    published: float
    unit: str
    tolerance: float
    kind: Literal["check", "fit", "bound"]
    source: str
    model: Callable[[], float]

    @property
    def error(self) -> float:
        """Relative difference of the modelled from the published number."""
        return self.model() / self.published - 1

    @property
    def holds(self) -> bool:
        """Whether the model is within the tolerance, or below the limit of a bound."""
        return self.error <= 0 if self.kind == "bound" else abs(self.error) <= self.tolerance


def _ms(result: CostResult) -> float:
    return result.modelled_ns / 1e6


def _tensor_ms(result: CostResult) -> float:
    return result.busy_ns[0, "tensor"] / 1e6


def _vector_ms(result: CostResult) -> float:
    return result.busy_ns[0, "vector"] / 1e6


def _packet_ms(result: CostResult) -> float:
    return result.dma.engine_ns / 1e6


def _utilisation_percent() -> float:
    flops = 2 * streams.M * streams.N * streams.K
    ns = streams.whole(streams.matmul_k_blocked, _ms) * 1e6
    return 100 * flops / ns / BASE.peak_flops_per_ns


def _transfer_ns(partitions: int, columns: int) -> float:
    """Time of the busiest DMA engine for one fp32 load."""
    fp32 = "float32"
    result = streams.one_dma(tile(partitions, columns, fp32), hbm(partitions, columns, fp32))
    (step,) = result.plan.steps
    assert step.transfer is not None
    return float(step.transfer.engine_ns.max())


def _landed_ns() -> float:
    result = streams.one_dma(tile(128, 128), hbm(128, 128), "gpsimd")
    return result.timings[0].done - BASE.dma_semaphore_ns


def _matmul(
    name: str,
    what: str,
    published: float,
    tolerance: float,
    kernel: Callable[[int], CostResult],
    quantity: Callable[[CostResult], float],
    kind: Literal["check", "fit"] = "check",
) -> Row:
    def model() -> float:
        return streams.whole(kernel, quantity)

    return Row(name, what, published, "ms", tolerance, kind, MATMUL, model)


def _dense(
    name: str, heads: int, queries: int, keys: int, ms: float, kind: Literal["check", "fit"]
) -> list[Row]:
    what = f"{heads} heads, {queries} queries, {keys} keys"
    documented = BASE.with_measured({"dma_transpose_sbuf": 0.5})
    return [
        Row(name, what, ms, "ms", 0.07, kind, DENSE, lambda: dense_ns(heads, queries, keys) / 1e6),
        Row(
            f"{name}d",
            f"{what}, documented transpose rate",
            ms,
            "ms",
            0.45,
            "check",
            DENSE,
            lambda: dense_ns(heads, queries, keys, documented) / 1e6,
        ),
    ]


def _causal(name: str, short: int, long: int, ms: float) -> Row:
    def model() -> float:
        return (causal_ns(16, long) - causal_ns(16, short)) / 1e6

    what = f"increment from {short} to {long} rows"
    return Row(name, what, ms, "ms", 0.07, "check", CAUSAL, model)


def _curve(size: int, share: float) -> Row:
    issue_ns = 860  # what the published curve implies, see SENSITIVITY

    def model() -> float:
        return streams.dma_rate(size, issue_ns) / streams.dma_rate(32768, issue_ns)

    what = f"DMA of {size} B per partition, share of the plateau"
    return Row(f"K{size}", what, share, "-", 0.12, "fit", DMA, model)


def _rate(
    name: str, what: str, published: float, unit: str, tolerance: float, model: Callable[[], float]
) -> Row:
    return Row(name, what, published, unit, tolerance, "check", RATES, model)


ROWS: tuple[Row, ...] = (
    _matmul("M2", "naive, bound by issue", 39.89, 0.03, streams.matmul_naive, _ms),
    _matmul("M3", "hoisted loads", 28.20, 0.03, streams.matmul_hoisted, _ms),
    _matmul("M4", "blocked", 28.41, 0.03, streams.matmul_blocked, _ms),
    _matmul("M5", "blocked in K too", 28.30, 0.03, streams.matmul_k_blocked, _ms),
    _matmul("M5pe", "Tensor Engine active", 28.16, 0.02, streams.matmul_k_blocked, _tensor_ms),
    Row(
        "M5hfu",
        "hardware FLOP utilisation",
        24.70,
        "%",
        0.02,
        "check",
        MATMUL,
        _utilisation_percent,
    ),
    _matmul(
        "M2pk", "summed packet time, naive", 519.58, 0.03, streams.matmul_naive, _packet_ms, "fit"
    ),
    _matmul(
        "M3pk",
        "summed packet time, hoisted",
        402.07,
        0.03,
        streams.matmul_hoisted,
        _packet_ms,
        "fit",
    ),
    _matmul(
        "M5pk", "summed packet time, 4 and 8 KiB", 81.73, 0.30, streams.matmul_k_blocked, _packet_ms
    ),
    _matmul("M5dve", "Vector Engine active", 2.99, 0.08, streams.matmul_k_blocked, _vector_ms),
    Row(
        "D1",
        "4 partitions x 8 KiB on one engine",
        1416,
        "ns",
        0.05,
        "check",
        DMA,
        lambda: _transfer_ns(4, 2048),
    ),
    Row("D2", "one 2 KiB transfer", 97, "ns", 0.06, "check", DMA, lambda: _transfer_ns(1, 512)),
    Row(
        "D3", "software queue, trigger to 32 KiB landed", 1190, "ns", 0.25, "check", DMA, _landed_ns
    ),
    Row(
        "A1",
        "isolated exp [128, 128]",
        400,
        "ns",
        0.05,
        "fit",
        DMA,
        lambda: streams.isolated_exp().modelled_ns - BASE.act_table_load_ns,
    ),
    *_dense("C1", 2, 17280, 140544, 36.2, "fit"),
    *_dense("C2", 7, 4736, 37888, 10.1, "check"),
    *_dense("C3", 7, 4736, 37760, 10.0, "check"),
    *_dense("C4", 7, 5376, 43008, 12.8, "check"),
    Row(
        "C7",
        "12 heads, 4680 queries, 6240 keys, one short call",
        3.85,
        "ms",
        0.25,
        "check",
        "third party on trn2: attention_cte, unmasked, launch included",
        lambda: dense_ns(12, 4680, 6240) / 1e6,
    ),
    _causal("C5", 2048, 4096, 1.686),
    _causal("C6", 3072, 4096, 0.981),
    Row(
        "B1",
        "Vector Engine, dependent fp32 operations",
        170.7,
        "us",
        0.15,
        "check",
        MAMBA,
        lambda: streams.dependent_vector_chain().modelled_us,
    ),
    Row(
        "T1",
        "double-row fp8 matmul 512x16384x1024, p99 limit",
        320,
        "us",
        0,
        "bound",
        "nki-samples unit test on trn2",
        lambda: streams.double_row_matmul().modelled_us,
    ),
    _rate(
        "R1", "bf16 matmul 16384 cubed on two cores, field", 134.7, "TF", 0.05, rates.matmul_tflops
    ),
    _rate(
        "R2",
        "moving column in a busy attention kernel, field",
        0.56,
        "ns",
        0.16,
        rates.moving_column_ns,
    ),
    _rate("R3", "gather of 2 KiB rows on one core, field", 128, "GB", 0.10, rates.gather_rate),
    _rate(
        "R4", "trip of a device loop with a pipeline in it (trn1)", 9.5, "us", 0.06, rates.trip_us
    ),
    _rate(
        "R5", "exp of 512 columns with row sum (trn1)", 466, "ns", 0.05, lambda: rates.exp_ns(512)
    ),
    _rate(
        "R6",
        "exp of 2048 columns with row sum (trn1)",
        1574,
        "ns",
        0.05,
        lambda: rates.exp_ns(2048),
    ),
    *(
        _curve(size, share)
        for size, share in ((256, 0.103), (512, 0.206), (1024, 0.422), (2048, 0.813), (4096, 0.966))
    ),
)


def table() -> str:
    """All rows as text."""
    head = f"{'row':6} {'kind':6} {'published':>10} {'modelled':>10} {'error':>7} {'tol':>5}  what"
    lines = [head]
    for row in ROWS:
        mark = "" if row.holds else "  MISS"
        lines.append(
            f"{row.name:6} {row.kind:6} {row.published:7.4g} {row.unit:2} {row.model():7.4g} "
            f"{row.unit:2} {row.error:+7.1%} {row.tolerance:5.0%}  {row.what} ({row.source}){mark}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print the table; 1 if a row misses its tolerance. There are no options."""
    parser = argparse.ArgumentParser("segattn.tests.checks.calibration", description=__doc__)
    parser.parse_args(argv)
    print(table())
    return 0 if all(row.holds for row in ROWS) else 1
