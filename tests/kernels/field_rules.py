"""What our own kernels violate of the rules from the field.

`python -m segattn.tests.kernels.field_rules` prints each violation with its line.
"""

import warnings
from collections.abc import Callable
from typing import Any, Final

import ml_dtypes
import numpy as np

from segattn.kernels import (
    Launch,
    prepare_padded_prefill,
    prepare_paged_decode,
    prepare_segmented_attention,
    prepare_write_kv_cache,
)
from segattn.reference.nki import NkiWarning, strict
from segattn.tests.kernels.cases import Options, normal, paged_tokens

BF16: Final = ml_dtypes.bfloat16
FP8: Final = ml_dtypes.float8_e4m3fn
MIXED: Final = [10, 20, 54, 22, 108, 334, 78, 4090, 925, 3612, 172, 34]


def _options(turned: bool = False, fp8: bool = False, **more: Any) -> Options:
    fields: dict[str, Any] = {
        "window": None, "with_sinks": False, "per_head_scales": False, "lnc": 1,
        "with_scales": False, "scale": None, **more,
    }  # fmt: skip
    return Options(fp8=FP8 if fp8 else None, k_pre_transposed=turned, **fields)


def _segmented(
    heads: tuple[int, int],
    rows: int,
    prior: int,
    softmax: str,
    options: Options,
    dtype: Any = BF16,
    segment: int = 512,
    d: int = 64,
    cross: bool = False,
    **more: Any,
) -> Launch[Any]:
    rng = np.random.default_rng(1)
    paged = paged_tokens(rng, [prior], heads[1], d, 32, options.cache_dtype(dtype))
    q, k, v = (normal(rng, (n, rows, d), dtype) for n in (heads[0], heads[1], heads[1]))
    own = (None, None) if cross else (k, v)
    return prepare_segmented_attention(
        q, own[0], own[1], options.stored_keys(paged.k_cache), paged.v_cache, paged.tables[0],
        prior, rows - 3, kv_segment_size=segment, softmax=softmax, **more,
        **options.arguments(rng, heads[0]), **options.scales(rng, heads[1], dtype),
    )  # fmt: skip


def _padded(
    heads: tuple[int, int], options: Options, rows: int = 256, dtype: Any = BF16
) -> Launch[Any]:
    rng = np.random.default_rng(2)
    q, k, v = (normal(rng, (n, rows, 64), dtype) for n in (heads[0], heads[1], heads[1]))
    shape = (rows // 16 + 1, heads[1], 16, 64)
    k_cache, v_cache = (np.zeros(shape, options.cache_dtype(dtype)) for _ in "kv")
    slots = np.full(rows, -1, np.int32)
    slots[: rows - 9] = np.arange(3, rows - 6)
    return prepare_padded_prefill(
        q, k, v, options.stored_keys(k_cache), v_cache, slots, rows - 9,
        **options.arguments(rng, heads[0]), **options.scales(rng, heads[1], dtype),
    )  # fmt: skip


def _decode(
    lengths: list[int],
    heads: tuple[int, int],
    options: Options,
    queries: int = 1,
    dtype: Any = BF16,
    d: int = 64,
) -> Launch[Any]:
    rng = np.random.default_rng(3)
    paged = paged_tokens(rng, lengths, heads[1], d, 32, options.cache_dtype(dtype))
    return prepare_paged_decode(
        normal(rng, (len(lengths), heads[0], queries, d), dtype),
        options.stored_keys(paged.k_cache), paged.v_cache, paged.tables,
        np.array(lengths, np.int32),
        **options.arguments(rng, heads[0]), **options.scales(rng, heads[1], dtype),
    )  # fmt: skip


def _latents() -> Launch[Any]:
    rng = np.random.default_rng(5)
    lengths = [300, 7, 2000]
    paged = paged_tokens(rng, lengths, 1, 576, 32, BF16)
    q = normal(rng, (len(lengths), 16, 2, 576), BF16)
    step = paged.tables, np.array(lengths, np.int32)
    return prepare_paged_decode(q, paged.k_cache, None, *step, value_dim=512, lnc=2)


def _write(heads: int, options: Options, dtype: Any = BF16) -> Launch[Any]:
    rng = np.random.default_rng(4)
    k, v = (normal(rng, (heads, 100, 64), dtype) for _ in "kv")
    k_cache, v_cache = (np.zeros((9, heads, 16, 64), options.cache_dtype(dtype)) for _ in "kv")
    slots = rng.permutation(9 * 16)[:100].astype(np.int32)
    slots[::7] = -1
    return prepare_write_kv_cache(
        k, v, options.stored_keys(k_cache), v_cache, slots, **options.scales(rng, heads, dtype)
    )


CALLS: Final[dict[str, Callable[[], Launch[Any]]]] = {
    "segmented exact": lambda: _segmented((2, 1), 256, 1100, "exact", _options()),
    "segmented exact fp32": lambda: _segmented((2, 1), 128, 600, "exact", _options(), np.float32),
    "segmented bounded": lambda: _segmented((2, 1), 512, 2100, "bounded", _options()),
    "segmented bounded lnc 2": lambda: _segmented(
        (4, 2), 512, 2100, "bounded", _options(lnc=2), d=128
    ),
    "segmented exact lnc 2, 3 KV heads": lambda: _segmented(
        (3, 3), 512, 2100, "exact", _options(lnc=2)
    ),
    "segmented turned fp8": lambda: _segmented((2, 1), 256, 700, "auto", _options(True, True)),
    "segmented window sinks": lambda: _segmented(
        (3, 3), 256, 900, "exact", _options(window=300, with_sinks=True)
    ),
    "segmented no prior": lambda: _segmented((2, 1), 256, 0, "exact", _options()),
    "segmented exact, not causal": lambda: _segmented(
        (2, 1), 256, 600, "exact", _options(softcap=30.0), causal=False, return_lse=True
    ),
    "segmented bounded, not causal": lambda: _segmented(
        (2, 1), 256, 600, "bounded", _options(), causal=False
    ),
    "segmented cross lnc 2": lambda: _segmented(
        (4, 2),
        256,
        700,
        "exact",
        _options(lnc=2, with_sinks=True),
        cross=True,
        causal=False,
        return_lse=True,
    ),
    "padded": lambda: _padded((2, 1), _options()),
    "padded turned fp8, 2 KV heads": lambda: _padded((4, 2), _options(True, True, lnc=2)),
    "padded fp32 window": lambda: _padded((2, 2), _options(window=100), 128, np.float32),
    "decode": lambda: _decode([300, 7, 2000], (8, 1), _options()),
    "decode lnc 2, mixed": lambda: _decode(MIXED, (8, 2), _options(lnc=2), d=128),
    "decode turned fp8, 2 KV heads": lambda: _decode([90, 700], (4, 2), _options(True, True)),
    "decode queries window sinks": lambda: _decode(
        [500, 44], (4, 2), _options(window=128, with_sinks=True), 3
    ),
    "decode latents lnc 2": _latents,
    "decode fp32": lambda: _decode([500, 44], (4, 4), _options(), dtype=np.float32),
    "write": lambda: _write(1, _options()),
    "write 3 KV heads": lambda: _write(3, _options()),
    "write turned fp8, 2 KV heads": lambda: _write(2, _options(True, True)),
}


SKIPS: Final = "decode lnc 2, mixed"
"""The call that runs several batches in a device loop, whose gathers leave idle lanes out."""


def violations(call: Callable[[], Launch[Any]]) -> set[str]:
    """Rule, file, line and text of each violation, for one launch of ours."""
    launch = call()
    with warnings.catch_warnings(record=True) as seen, strict(field="warn"):
        warnings.simplefilter("always")
        launch.kernel[launch.grid](*launch.arrays)
    found = set()
    for warning in seen:
        if isinstance(warning.message, NkiWarning):
            text, _, rule = str(warning.message).rpartition(" [rule ")
            place = warning.filename.rpartition("/kernels/")[2]
            found.add(f"{rule.rstrip(']').split(',')[0]}: {place}:{warning.lineno}: {text}")
    return found


if __name__ == "__main__":
    for name, call in CALLS.items():
        for line in sorted(violations(call)) or ["nothing"]:
            print(f"{name}: {line}")
