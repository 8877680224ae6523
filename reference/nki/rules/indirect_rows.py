"""Rules on the rows that a vector_offset chooses: "row_span", and one index per partition."""

from __future__ import annotations

from ..errors import NkiValidationError, at_kernel_line
from ..strict import violation
from ..tensor import NkiTensor

_GATHER_TRANSPOSE = "nisa.dma_transpose"


def check_indirect_operand(me: str, operand: str, t: NkiTensor) -> None:
    """What the pattern of an indirect operand and the shape of its index tile must be.

    NkiValidationError where an index would be ignored.
    """
    dynamic = t.dynamic
    assert dynamic is not None
    assert isinstance(dynamic.index, NkiTensor)
    index = dynamic.index
    columns = index.size // index.shape[0]
    if columns > 1 and (me != _GATHER_TRANSPOSE or index.size > t.shape[0]):
        raise NkiValidationError(
            f"{me}: operand {operand} {t.name!r} has a vector_offset of shape {index.shape} for "
            f"{t.shape[0]} rows; allowed: one index per partition, [P, 1]: use one DMA for each "
            f"column{at_kernel_line()}"
        )
    layout, step = t.v.layout, dynamic.step
    inner = sum((n - 1) * s for n, s in zip(layout.shape[1:], layout.strides[1:], strict=True))
    first = t.v.offset % step
    if first + inner >= step:
        violation(
            "row_span",
            f"{me}: operand {operand} {t.name!r} moves elements {first}..{first + inner} from the "
            f"start of an indexed row of {step}; reshape the tensor so that a row holds the whole "
            "transfer",
        )
