"""Modelled performance that the kernels have to reach, one row per shape.

Model FLOP utilisation of one core with the base constants in program order, bf16, unless a row
says otherwise.
"""

from dataclasses import dataclass
from typing import Any

from segattn.benchmarks.kernels.modelled import Modelled
from segattn.benchmarks.kernels.workloads import CacheWrite, Decode, Prefill, Workload


@dataclass(frozen=True)
class Target:
    """A workload and what it must reach."""

    workload: Workload
    at_least: float = 0.0
    metric: str = "mfu"
    """"mfu", or "hbm": share of the HBM rate."""
    most_field_us: float | None = None
    """Most modelled time in the band `field`."""

    def reached(self, modelled: Modelled) -> float:
        """The value of the metric."""
        return modelled.mfu() if self.metric == "mfu" else modelled.hbm_share()

    def holds(self, modelled: Modelled) -> bool:
        """Whether the target is met."""
        fast = self.most_field_us is None or modelled.us["field"] <= self.most_field_us
        return fast and self.reached(modelled) >= self.at_least

    def as_json(self) -> dict[str, Any]:
        """Plain values for a results file."""
        return {
            "target": self.at_least, "metric": self.metric, "most_field_us": self.most_field_us,
        }  # fmt: skip

    @property
    def text(self) -> str:
        """What must be reached, or nothing."""
        share = f"{self.at_least:.1%}" if self.at_least else ""
        time = f"{self.most_field_us:g} us" if self.most_field_us else ""
        return ", ".join(filter(None, (share, time)))


PADDING_LIMIT = 1.15
"""Most modelled time of a chunk in a bucket that is too large, over its time in a fitting one."""

EXACT_LIMIT = 1.6
"""Most modelled time of softmax="exact" over that of "auto", on the prefill rows and EXACT_ROWS."""

PADDED = Prefill(8192, 0, num_tokens=5000), Prefill(5120, 0, num_tokens=5000)
"""The same 5000 tokens in a bucket of 8192 and in one that fits."""

PRIORS = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Of the picture of time against prior length."""

SWEEP = tuple(Prefill(rows, prior) for rows in (512, 2048) for prior in PRIORS)

TARGETS: tuple[Target, ...] = (
    Target(Prefill(2048, 8192), 0.82),
    Target(Prefill(1024, 8192), 0.76),
    Target(Prefill(2048, 2048), 0.73),
    Target(Prefill(512, 8192), 0.69),
    Target(Prefill(512, 8192, q_heads=1), 0.46),
    Target(Prefill(2048, 0), 0.65),
    Target(Prefill(2048, 8192, head_dim=64), 0.43),
    Target(Prefill(4096, 0), most_field_us=460),
    Target(Prefill(4096, 4096), most_field_us=1100),
    Target(Prefill(4096, 28672), most_field_us=5000),
    Target(Decode(1, 32768), 0.75, "hbm", 95),
    Target(Decode(1, 32768, block_size=64), 0.75, "hbm", 95),
    Target(Decode(1, 32768, block_size=128), 0.75, "hbm", 95),
    Target(Decode(16, 2048), 0.75, "hbm", 95),
    Target(CacheWrite(2048), 1 / 1.3, "hbm"),
)
"""All rows. Those of 4096 rows are what one core has of a call of 8 query on 2 KV heads, for which
AWS's kernel was measured at 2742, 4411 and 14045 us on two. The cache write may take 1.3 times the
bound of moving its bytes through HBM once in and once out.
"""

EXACT_ROWS = (
    Prefill(2048, 100),
    Prefill(2048, 1500),
    Prefill(2048, 1500, head_dim=96),
    Prefill(2048, 1500, fp8=True),
    Prefill(2048, 2047),
    Prefill(512, 2047, q_heads=8),
    Prefill(2048, 1024, window=2454),
    Prefill(2048, 8192, window=2048),
    Prefill(2048, 8192, window=4096),
    Prefill(2048, 8192, window=8000),
    Prefill(4096, 1500, q_heads=1, window=2048),
)
"""Shapes besides the targets on which the exact softmax is slow: long windows, many rows over the
rest that whole segments leave of a prior, narrow heads."""
