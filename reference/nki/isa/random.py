"""Random numbers. The generators of the device are not documented: values differ from hardware,
seeding and reproducibility do not.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ..core import current
from ..dtypes import FLOATS, INTEGERS
from ..errors import NkiValidationError
from ..regions import PSUM
from ..tensor import NkiTensor
from .elementwise import choose_engine
from .enums import NkiInstruction, engine
from .execute import finish, operand_value, put, raw
from .operands import (
    SBUF_ONLY,
    check_destination,
    check_same_size,
    check_tile,
    check_vector,
    is_tensor,
)

_BITS32: Final = frozenset({"uint32", "int32", "float32"})
STATE_WORDS: Final = 6
"""uint32 words of a GpSimd generator's state per partition."""


def rng(dst: NkiTensor, engine: engine = engine.vector, name: str | None = None) -> NkiInstruction:
    """Random bits: the low bits of 32 random bits per element, for an integer dst."""
    me = "nisa.rng"
    out = check_tile(me, "dst", dst, dtypes=INTEGERS - {"bool_"})
    check_destination(me, dst)
    chosen = choose_engine(me, engine, (_VECTOR, _GPSIMD), "vector")
    if chosen == "gpsimd" and out.region is PSUM:
        raise NkiValidationError(f"{me}: GpSimd cannot access PSUM; use the vector engine")
    bits = current().random.integers(0, 2**32, out.shape, np.uint32)
    put(dst, bits.astype(f"u{out.itemsize}").view(out.np_dtype), me)
    return finish(chosen, "rng", (dst,), ())


_VECTOR: Final = engine.vector
_GPSIMD: Final = engine.gpsimd


def dropout(dst: NkiTensor, data: NkiTensor, prob: Any, name: str | None = None) -> NkiInstruction:
    """Store dst = data with elements replaced by 0 with probability prob, a scalar or [P, 1]."""
    me = "nisa.dropout"
    out, source = check_tile(me, "dst", dst), check_tile(me, "data", data)
    check_destination(me, dst)
    check_same_size(me, "data", source, out)
    if out.dtype != source.dtype:
        raise NkiValidationError(
            f"{me}: dst has dtype {out.dtype}, data {source.dtype}; they must be the same"
        )
    if is_tensor(prob):
        allowed = FLOATS if source.dtype in FLOATS else frozenset({"float32"})
        check_vector(me, "prob", prob, source.partitions, allowed)
    elif not isinstance(prob, (int, float, np.number)) or not 0 <= prob <= 1:
        raise NkiValidationError(f"{me}: prob {prob!r}; allowed: 0..1 or a tile")
    values = raw(data, me, "data").reshape(out.shape)
    limit = operand_value(prob, out.ndim, me, "prob")
    dropped = current().random.random(out.shape) < limit
    put(dst, np.where(dropped, np.zeros((), values.dtype), values), me)
    return finish("vector", "dropout", (dst,), (data, *((prob,) if is_tensor(prob) else ())))


def set_rng_seed(src_seeds: NkiTensor, name: str | None = None) -> NkiInstruction:
    """Seed the Vector Engine's generator with a [1, 1] 32-bit value."""
    me = "nisa.set_rng_seed"
    layout = check_tile(me, "src_seeds", src_seeds, dtypes=_BITS32)
    if layout.size != 1:
        raise NkiValidationError(f"{me}: src_seeds has shape {layout.shape}; needed [1, 1]")
    seed = int(raw(src_seeds, me, "src_seeds").reshape(-1).view(np.uint32)[0])
    current().random = np.random.default_rng(seed)
    return finish("vector", "set_rng_seed", (), (src_seeds,))


def rand_set_state(
    src_seeds: NkiTensor, engine: engine = engine.gpsimd, name: str | None = None
) -> NkiInstruction:
    """Set the state of GpSimd's generator: [P, 6] uint32 in SBUF."""
    me = "nisa.rand_set_state"
    _check_state(me, "src_seeds", src_seeds, engine)
    state = raw(src_seeds, me, "src_seeds").reshape(-1, STATE_WORDS).copy()
    core = current()
    core.random_state = state
    core.random = np.random.default_rng(state.reshape(-1).tolist())
    return finish("gpsimd", "rand_set_state", (), (src_seeds,))


def rand_get_state(
    dst: NkiTensor, engine: engine = engine.gpsimd, name: str | None = None
) -> NkiInstruction:
    """Store the state that rand_set_state gave GpSimd's generator: [P, 6] uint32 in SBUF."""
    me = "nisa.rand_get_state"
    _check_state(me, "dst", dst, engine)
    check_destination(me, dst)
    state = current().random_state
    if state is None or len(state) < dst.shape[0]:
        raise NkiValidationError(
            f"{me}: {dst.shape[0]} partitions without a state; call rand_set_state"
        )
    put(dst, state[: dst.shape[0]].reshape(dst.shape), me)
    return finish("gpsimd", "rand_get_state", (dst,), ())


def _check_state(me: str, operand: str, t: Any, chosen: Any) -> None:
    layout = check_tile(me, operand, t, regions=SBUF_ONLY, dtypes=frozenset({"uint32"}))
    if layout.ndim != 2 or layout.free != STATE_WORDS:
        raise NkiValidationError(
            f"{me}: operand {operand} has shape {layout.shape}; needed [P, {STATE_WORDS}]"
        )
    if chosen is not _GPSIMD:
        raise NkiValidationError(f"{me}: engine {chosen}; allowed on trn2: gpsimd")
