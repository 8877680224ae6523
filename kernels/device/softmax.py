"""Numbers and scales of an exact softmax.

Scores that a row must not see have MASKED added before the maximum is taken. The maximum never
falls below FLOOR, far above MASKED: a row that sees nothing gets weights of exactly 0, and no
difference of infinities arises. FLOOR is a power of two, so that scale * FLOOR is exact.
"""

from dataclasses import dataclass

from ..backend import nisa, nl

SUM_FLOOR = 2.0**-60
"""Row sums are at least 1 unless the row saw nothing; this keeps 0 / 0 away."""


@dataclass
class ScoreScale:
    """Factor of the raw scores: numbers, or [rows, 1] fp32 tiles when it is a runtime value."""

    positive: float | nl.NkiTensor
    negative: float | nl.NkiTensor


def cached_scale(k_scale: nl.NkiTensor, scale: float) -> ScoreScale:
    """Factor of scores against stored keys: the softmax scale times k_scale [rows, 1]."""
    positive = nl.ndarray(k_scale.shape, dtype=nl.float32, buffer=nl.sbuf)
    negative = nl.ndarray(k_scale.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=positive, data=k_scale, op0=nl.multiply, operand0=scale)
    nisa.tensor_scalar(dst=negative, data=k_scale, op0=nl.multiply, operand0=-scale)
    return ScoreScale(positive, negative)
