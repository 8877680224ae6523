"""What the tests of modelled timelines share."""

from segattn.reference.nki.cost.result import CostResult
from segattn.reference.nki.records import Access, Instruction
from segattn.tests.checks.calibration.streams import Stream

FP32 = "float32"
ADD_512 = (512 + 64) / 0.96
"""Vector Engine, one fp32 input of 512 columns."""
HOP = 60


def starts(result: CostResult) -> list[float]:
    """Start of each executed instruction, in program order."""
    times = zip(result.plan.steps, result.timings, strict=True)
    return [t.start for step, t in times if isinstance(step.record, Instruction)]


def scale(stream: Stream, dst: Access, src: Access) -> None:
    stream.compute("vector", "tensor_scalar", 0, (dst,), (src,), "multiply")
