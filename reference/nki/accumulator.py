"""The accumulator registers of an engine: one float32 per partition, kept between instructions."""

from __future__ import annotations

import numpy as np

from .dtypes import Array
from .regions import NUM_PARTITIONS
from .strict import violation


class Accumulator:
    """128 registers, of which `is_set` marks those whose value an instruction defined."""

    __slots__ = ("is_set", "values")

    def __init__(self) -> None:
        self.values: Array = np.full(NUM_PARTITIONS, np.nan, np.float32)
        self.is_set: Array = np.zeros(NUM_PARTITIONS, np.bool_)

    def store(self, rows: slice, values: Array | float) -> None:
        """Define the registers of these partitions."""
        self.values[rows] = values
        self.is_set[rows] = True

    def forget(self, rows: slice) -> None:
        """Leave the registers of these partitions undefined."""
        self.values[rows] = np.nan
        self.is_set[rows] = False

    def read(self, rows: slice, instruction: str) -> Array:
        """The registers of these partitions; rule "stale_accumulator" when one is not set."""
        if not self.is_set[rows].all():
            first = rows.start + int(np.argmin(self.is_set[rows]))
            violation(
                "stale_accumulator",
                f"{instruction}: uses the accumulator register of partition {first} (of "
                f"{rows.start}..{rows.stop - 1}), which no earlier instruction of this engine set; "
                "start the chain with reduce_cmd.reset_reduce (or reset) on the same partitions",
            )
        return self.values[rows].copy()
