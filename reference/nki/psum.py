"""Accumulation state of PSUM: which elements of a tile hold matmul sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .dtypes import Array
from .rules.psum_chains import Chains

if TYPE_CHECKING:
    from .rules.regions import LoopRegion
    from .view import Bytes, View


class PsumState:
    """Which elements of one PSUM tile a later matmul may add to.

    The state belongs to the tile and not to its address: an allocator that hands out the same
    bank again starts a new group. `epoch` counts the changes, so that a view may remember that
    all of it is summed.
    """

    __slots__ = (
        "_map", "any_sum", "by_tensor_engine", "chains", "epoch", "filled", "region", "whole",
    )  # fmt: skip

    def __init__(self) -> None:
        self.any_sum = False
        self.whole = False
        self.epoch = 0
        self._map: Array | None = None
        self.chains = Chains()
        self.by_tensor_engine = False
        """Whether the Tensor Engine has written the tile."""
        self.filled = False
        """Whether something other than a summing matmul has written the tile."""
        self.region: LoopRegion | None = None
        """The first device loop that used the tile."""

    def summed(self, view: View, storage: Bytes) -> bool | Array:
        """True or False when it holds for all elements of the view, else one bool per element."""
        if self.whole or (view.group_epoch == self.epoch):
            return True
        if not self.any_sum:
            return False
        mask = self._mask(view, storage) != 0
        if mask.all():
            return True
        return mask if mask.any() else False

    def add_group(self, view: View, storage: Bytes) -> None:
        """A matmul wrote the view: later ones may add to it."""
        if self.whole or view.group_epoch == self.epoch:
            return
        self.any_sum = True
        if self._map is None and view.layout.run * view.layout.itemsize == storage.nbytes:
            self.whole = True
        else:
            self._mask(view, storage)[...] = -1
        self.epoch += 1
        view.group_epoch = self.epoch

    def overwrite(self, view: View, storage: Bytes) -> None:
        """Something other than a summing matmul wrote the view."""
        self.epoch += 1
        self.chains.forget(view)
        if view.layout.run * view.layout.itemsize == storage.nbytes:
            self.any_sum = self.whole = False
            self._map = None
            return
        self._mask(view, storage)[...] = 0
        self.whole = False

    def _mask(self, view: View, storage: Bytes) -> Array:
        """The summed map under the view; every byte of an element has its state."""
        if self._map is None:
            self._map = np.zeros(storage.buffer.size, np.int8)
            if self.whole:
                self._map[...] = -1
        layout = view.layout
        return np.ndarray(
            layout.shape,
            np.dtype(f"i{layout.itemsize}"),
            self._map,
            storage.base + layout.byte_step(view.offset),
            layout.np_strides,
        )
