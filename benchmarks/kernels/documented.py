"""`segattn bench kernels --documented`: shapes of docs/kernels.md besides the targets."""

from collections.abc import Iterator
from typing import Any

from segattn.benchmarks.kernels.modelled import Functions, model, record
from segattn.benchmarks.kernels.workloads import CacheWrite, Decode, KeyColumns, Prefill, Workload
from segattn.reference.nki.cost.constants import CostConstants

WINDOWS: tuple[Prefill, ...] = (
    Prefill(2048, 8192, window=4096),
    Prefill(2048, 8192, window=8000),
    Prefill(2048, 8192, q_heads=1, window=4096),
    Prefill(512, 8192, window=4096),
    Prefill(2048, 8192, q_heads=8, head_dim=64, window=128),
)

DECODES: tuple[Decode, ...] = (
    Decode(4, 131072),
    Decode(16, 4000),
    Decode(16, 2100),
    Decode(16, 2048, q_heads=32, kv_heads=8, head_dim=64),
    Decode(1, 32768, head_dim=64),
    Decode(1, 32768, q_heads=16),
    Decode(1, 32768, q_heads=32),
    Decode(64, 512),
    Decode(1, 8192),
    Decode(1, 2048),
)

BLOCKS = (128, 64, 32, 16)

KEYS: tuple[Workload, ...] = (
    *(KeyColumns(Prefill(512, 8192, q_heads=1, block_size=size)) for size in BLOCKS),
    Prefill(512, 8192, q_heads=1, block_size=128, fp8=True),
    KeyColumns(Prefill(512, 8192, q_heads=1, block_size=128, fp8=True)),
    KeyColumns(Prefill(2048, 8192, block_size=128)),
    *(KeyColumns(Prefill(2048, 8192, block_size=size, window=4096)) for size in BLOCKS),
    Prefill(512, 8192, q_heads=1, window=4096),
    *(KeyColumns(Prefill(512, 8192, q_heads=1, block_size=size, window=4096)) for size in BLOCKS),
    *(KeyColumns(Decode(1, 32768, block_size=size)) for size in BLOCKS),
    *(KeyColumns(Decode(16, 32768, block_size=size, window=4096)) for size in BLOCKS),
    Decode(4, 2048, q_heads=32, kv_heads=8),
    *(KeyColumns(Decode(4, 2048, q_heads=32, kv_heads=8, block_size=size)) for size in BLOCKS),
    *(KeyColumns(CacheWrite(2048, block_size=size)) for size in BLOCKS),
    CacheWrite(2048, first=8),
    *(KeyColumns(CacheWrite(2048, block_size=size, first=8)) for size in BLOCKS),
)

DOCUMENTED: tuple[Workload, ...] = (*WINDOWS, *DECODES, *KEYS)


def documented_lines(functions: Functions, base: CostConstants) -> Iterator[str]:
    """Modelled time and share of the roof of each shape; with a window also exact over auto."""

    def us(work: Workload, **options: Any) -> tuple[float, str]:
        modelled, _ = model(work, record(work, functions, **options), ("base",), base)
        if work.kernel in ("segmented_attention", "padded_prefill"):
            return modelled.us["base"], f"{modelled.mfu():.1%} of the bf16 peak"
        return modelled.us["base"], f"{modelled.hbm_share():.1%} of the HBM rate"

    for work in DOCUMENTED:
        auto, share = us(work)
        line = f"{work.label}: modelled {auto:.1f} us, {share}"
        if isinstance(work, Prefill) and work.window is not None:
            line += f", exact over auto {us(work, softmax='exact')[0] / auto:.2f}"
        yield line
