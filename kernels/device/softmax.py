"""Numbers and scales of an exact softmax.

Scores that a row must not see have MASKED added before the maximum is taken. The maximum never
falls below FLOOR, far above MASKED: a row that sees nothing gets weights of exactly 0, and no
difference of infinities arises. FLOOR is a power of two, so that scale * FLOOR is exact.
"""

from dataclasses import dataclass

from ..backend import nisa, nl

SUM_FLOOR = 2.0**-60
"""Row sums are at least 1 unless the row saw nothing; this keeps 0 / 0 away."""

LOG_RANGE = (2.0**-126, 2.0**126)
"""What `logarithm` is accurate for: the normal fp32 numbers but for the largest ones."""


@dataclass
class ScoreScale:
    """Factor of the raw scores: numbers, or [rows, 1] fp32 tiles when it is a runtime value."""

    positive: float | nl.NkiTensor
    negative: float | nl.NkiTensor


def sigmoid_of(dst: nl.NkiTensor, products: nl.NkiTensor, factor: float | nl.NkiTensor) -> None:
    """Dst [rows, n] fp32 SBUF = 1 / (1 + exp(factor * products)); factor is -`of_products`.

    It caps scores: c * tanh(x) = 2 c * sigmoid(2 x) - c. The last term moves all scores of a row
    alike, so it is left out, sinks are raised by c, and the lse is lowered by it. ACT has exp
    loaded; a table of tanh or sigmoid would be loaded anew each time.
    """
    nisa.activation(dst=dst, op=nl.exp, data=products, scale=factor)
    nisa.tensor_scalar(dst=dst, data=dst, op0=nl.add, operand0=1.0, op1=nl.power, operand1=-1.0)


def cached_scale(k_scale: nl.NkiTensor, scale: float) -> ScoreScale:
    """Factor of scores against stored keys: the softmax scale times k_scale [rows, 1]."""
    positive = nl.ndarray(k_scale.shape, dtype=nl.float32, buffer=nl.sbuf)
    negative = nl.ndarray(k_scale.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=positive, data=k_scale, op0=nl.multiply, operand0=scale)
    nisa.tensor_scalar(dst=negative, data=k_scale, op0=nl.multiply, operand0=-scale)
    return ScoreScale(positive, negative)


def logarithm(dst: nl.NkiTensor, positive: nl.NkiTensor) -> None:
    """Dst = log of fp32 numbers within LOG_RANGE, others held to it.

    ACT's log is defined within 2^-64 .. 2^64 only, so it is taken of the square root, by DVE.
    """
    nisa.tensor_scalar(
        dst=dst, data=positive, op0=nl.maximum, operand0=LOG_RANGE[0], op1=nl.minimum,
        operand1=LOG_RANGE[1],
    )  # fmt: skip
    nisa.tensor_scalar(dst=dst, data=dst, op0=nl.power, operand0=0.5)
    nisa.activation(dst=dst, op=nl.log, data=dst)
    nisa.tensor_scalar(dst=dst, data=dst, op0=nl.multiply, operand0=2.0)
