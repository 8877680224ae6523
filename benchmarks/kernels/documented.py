"""`segattn bench kernels --documented`: shapes of docs/kernels.md besides the targets.

With the table of the targets, which comes first, and the ratios of `--exact` and `--padding`, which
it includes, that is every modelled number of the documentation of our kernels.
"""

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from segattn.benchmarks.kernels.modelled import Functions, model, record
from segattn.benchmarks.kernels.own_shapes import OwnShape
from segattn.benchmarks.kernels.workloads import CacheWrite, Decode, KeyColumns, Prefill, Workload
from segattn.reference.nki.cost.constants import BANDS, CostConstants

WINDOWS: tuple[Prefill, ...] = (
    Prefill(2048, 8192, window=4096),
    Prefill(2048, 8192, window=8000),
    Prefill(2048, 8192, q_heads=1, window=4096),
    Prefill(512, 8192, window=4096),
    Prefill(2048, 8192, q_heads=8, head_dim=64, window=128),
)

PREFILLS: tuple[Prefill, ...] = (
    Prefill(2048, 32768),
    Prefill(2048, 8192, q_heads=1),
    Prefill(2048, 8193),
    Prefill(1024, 8192, head_dim=64),
    Prefill(2048, 2048, head_dim=64),
    Prefill(512, 8192, head_dim=64),
)

DECODES: tuple[Decode, ...] = (
    Decode(1, 32768, block_size=16),
    Decode(16, 2048, q_heads=32, kv_heads=8),
    Decode(1, 32768, fp8=True),
    Decode(16, 2048, q_heads=32, kv_heads=8, fp8=True),
    Decode(16, 32768, window=4096),
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
    Decode(1, 2048, table_tokens=32768),
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

CAP = (("softcap", 30.0),)

CAPPED: tuple[Workload, ...] = (
    OwnShape(Prefill(2048, 8192), CAP),
    OwnShape(Prefill(2048, 8192), (*CAP, ("softmax", "exact"))),
    OwnShape(Prefill(2048, 0), CAP),
    OwnShape(Prefill(512, 8192), CAP),
    OwnShape(Decode(16, 2048), CAP),
    OwnShape(Decode(1, 32768), CAP),
)

ALL_SEEN = (("causal", False),)

NOT_CAUSAL: tuple[Workload, ...] = tuple(
    OwnShape(Prefill(rows, prior), options)
    for options in (ALL_SEEN, (*ALL_SEEN, ("softmax", "exact")))
    for rows, prior in ((2048, 8192), (2048, 0), (512, 8192))
) + (OwnShape(Prefill(512, 8192), (("k", None), ("v", None), *ALL_SEEN)),)
"""Their share of the peak counts the pairs of causal attention."""

MLA: tuple[Workload, ...] = tuple(
    Decode(batch, context, q_heads=heads, head_dim=576, value_dim=512)
    for batch, context in ((1, 32768), (16, 2048))
    for heads in (16, 32, 128)
)

BATCH = (("deterministic", "batch"),)

INVARIANT: tuple[Workload, ...] = tuple(
    OwnShape(shape, BATCH)
    for shape in (Prefill(2048, 8192), Prefill(512, 2048), Decode(16, 2048), Decode(1, 32768))
)

ONE_BYTE: tuple[Workload, ...] = tuple(
    OwnShape(Decode(1, 32768), (), cache=dtype)
    for dtype in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2, np.int8)
)

DOCUMENTED: tuple[Workload, ...] = (
    *WINDOWS,
    *PREFILLS,
    *DECODES,
    *CAPPED,
    *NOT_CAUSAL,
    *MLA,
    *INVARIANT,
    *ONE_BYTE,
    *KEYS,
)


HEAD = f"| call | {' | '.join(f'{name} us' for name in BANDS)} | share at base | exact over auto |"


def documented_lines(functions: Functions, base: CostConstants, only: str = "") -> Iterator[str]:
    """A Markdown table of the shapes whose label contains `only`: modelled time by band, share of
    the bf16 peak or of the HBM rate; of a prefill with a window also exact over auto.
    """
    yield HEAD
    yield "|---|" + "---|" * (len(BANDS) + 2)
    for work in DOCUMENTED:
        if only in work.label:
            auto, _ = model(work, record(work, functions), tuple(BANDS), base)
            prefill = work.kernel in ("segmented_attention", "padded_prefill")
            share = f"{auto.mfu():.1%} of peak" if prefill else f"{auto.hbm_share():.1%} of HBM"
            ratio = ""
            if isinstance(work, Prefill) and work.window is not None:
                exact, _ = model(work, record(work, functions, softmax="exact"), ("base",), base)
                ratio = f"{exact.us['base'] / auto.us['base']:.2f}"
            times = " | ".join(f"{auto.us[name]:.1f}" for name in BANDS)
            yield f"| {work.label} | {times} | {share} | {ratio} |"
