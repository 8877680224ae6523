"""Rules "ap_view", "tile_rank", "hbm_rank", "partial_output": which part of a tensor is meant."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..dtypes import Array
from ..strict import violation

MAX_DIMS: Final = 5
"""Dimensions of a view (NKI language guide)."""


def check_ap_view(
    name: str, shape: tuple[int, ...], offset: int, pairs: tuple[tuple[int, int], ...]
) -> None:
    """Documents disagree whether a pattern counts from the view or from the tensor."""
    violation(
        "ap_view",
        f".ap{list(pairs)} on a view of {name!r} (shape {shape} from element {offset}) that is not "
        "the whole tensor; call it on the tensor, with the offset of the part",
    )


def check_rank(where: str, shape: tuple[int, ...], on_chip: bool) -> bool:
    """A tile has a partition and a free dimension, a view at most five; whether that holds.

    AWS's gen_mask_tkg has a result in HBM with six: rule "hbm_rank".
    """
    least = 2 if on_chip else 1
    usual = least <= len(shape) <= MAX_DIMS
    if not usual:
        violation(
            "tile_rank" if on_chip else "hbm_rank",
            f"{where} of shape {shape} has {len(shape)} dimensions; allowed: {least}..{MAX_DIMS}",
        )
    return usual


def check_partial_output(name: str, missing: Array) -> None:
    """An output of which a part is never written holds whatever was in memory."""
    first = tuple(int(i) for i in np.argwhere(missing)[0])
    violation(
        "partial_output",
        f"{int(missing.sum())} of {missing.size} elements of the kernel output {name!r} are never "
        f"written, first at {first}; write them, or return the part that is",
    )
