"""Numbers and scales of an exact softmax.

Scores that a row must not see have MASKED added before the maximum is taken. The maximum never
falls below FLOOR, far above MASKED: a row that sees nothing gets weights of exactly 0, and no
difference of infinities arises. FLOOR is a power of two, so that scale * FLOOR is exact.
"""

from dataclasses import dataclass

from ..backend import nisa, nl

FLOOR = -(2.0**106)
"""Scores before the scale below about -8e31 count as this: -1e30 after 1 / sqrt(256) does not."""

MASKED = -1.5e38
"""Added to the score of a key that a row does not see, at most twice: finite then, so that the
hardware never meets infinity. Stays below FLOOR after a multiplication with a k_scale down to 1e-6.
"""

SUM_FLOOR = 2.0**-60
"""Row sums are at least 1 unless the row saw nothing; this keeps 0 / 0 away."""


@dataclass
class ScoreScale(nl.NKIObject):
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
