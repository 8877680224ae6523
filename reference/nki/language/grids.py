"""Grids: tensors in tile and block coordinates.

A grid selects cells of a tensor; a cell is a tile, or a block of so many tiles. Cells at the end of
a dimension are clamped to it. Indexing keeps the grid and moves no data; `.data` is the operand for
instructions. A grid that was allocated on the chip holds its tiles side by side in the free
dimension, each with room for a whole tile, so that a tensor may have more rows than partitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, SupportsIndex

from ..errors import NkiValidationError, at_kernel_line
from ..nkiobject import NKIObject
from ..regions import MemoryRegion
from ..tensor import NkiTensor


@dataclass(frozen=True)
class Axis:
    """The cells that are selected along one source dimension.

    Cell k begins at element `first + k * step * size` and has `size` elements, or fewer before
    `end`. Untiled dimensions have tiles of one element.
    """

    tile: int
    cell: int
    first: int
    end: int
    count: int
    step: int = 1
    tiled: bool = True
    consumed: bool = False

    @property
    def size(self) -> int:
        """Elements of a whole cell."""
        return self.tile * self.cell

    @property
    def elements(self) -> int:
        """Elements of all selected cells."""
        last = self.first + (self.count - 1) * self.step * self.size
        return (self.count - 1) * self.size + min(self.size, self.end - last)

    @property
    def is_one_range(self) -> bool:
        """Whether the cells are neighbours."""
        return self.step == 1 or self.count == 1 or self.size == 1

    def at(self, index: int) -> Axis:
        """One cell; the coordinate is consumed."""
        first = self.first + index * self.step * self.size
        end = min(first + self.size, self.end)
        return replace(self, first=first, end=end, count=1, step=1, consumed=True)

    def between(self, cells: range) -> Axis:
        """The cells of a slice."""
        first, last = self.at(cells[0]), self.at(cells[-1])
        step = self.step * cells.step
        return replace(self, first=first.first, end=last.end, count=len(cells), step=step)

    def regrouped(self, cell: int) -> Axis:
        """The same elements in cells of `cell` tiles."""
        if cell == self.cell and not self.consumed:
            return self
        if not self.is_one_range:
            raise NkiValidationError(
                f"a grid of every {self.step}th cell has gaps, which cells of another size would "
                f"straddle; regroup before the slice{at_kernel_line()}"
            )
        count = ceil(self.elements / (self.tile * cell))
        return replace(self, cell=cell, count=count, step=1, consumed=False)


class NkiGrid(NKIObject):
    """What tile and block grids have in common; `nl.tiles` and `nl.blocks` make them."""

    __slots__ = ("axes", "backing", "packed")

    __iter__ = None

    def __init__(
        self, *, backing: NkiTensor, axes: tuple[Axis, ...], packed: tuple[int, ...] | None
    ) -> None:
        self.backing = backing
        self.axes = axes
        self.packed = packed
        """Tiles along each dimension of a grid that was allocated on the chip, else None."""

    @property
    def _tiled(self) -> list[Axis]:
        return [axis for axis in self.axes if axis.tiled]

    @property
    def shape(self) -> tuple[int, ...]:
        """Cells along each coordinate that no integer index has consumed."""
        return tuple(axis.count for axis in self.axes if not axis.consumed)

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Elements of a whole tile."""
        return tuple(axis.tile for axis in self._tiled)

    @property
    def element_shape(self) -> tuple[int, ...]:
        """Selected elements along each source dimension; untiled ones that were indexed are gone.

        It is the shape of `data`.
        """
        kept = [axis for axis in self.axes if axis.tiled or not axis.consumed]
        return tuple(axis.elements for axis in kept)

    @property
    def index_step_elements(self) -> tuple[int, ...]:
        """Source elements from one cell to the next, per coordinate."""
        return tuple(axis.step * axis.size for axis in self.axes if not axis.consumed)

    @property
    def is_remainder(self) -> bool:
        """Whether a selected cell is clamped."""
        return any(axis.elements < axis.count * axis.size for axis in self.axes)

    @property
    def dtype(self) -> str:
        """Element dtype."""
        return self.backing.dtype

    @property
    def buffer(self) -> MemoryRegion:
        """Memory region."""
        return self.backing.buffer

    @property
    def is_data_representable(self) -> bool:
        """Whether one access pattern covers the selection.

        Its cells must be neighbours. Of a grid that was allocated on the chip, it is one tile, or
        neighbours along the last dimension of tiles with two dimensions.
        """
        if not all(axis.is_one_range for axis in self.axes):
            return False
        if self.packed is None:
            return True
        tiles = [ceil(axis.elements / axis.tile) for axis in self.axes]
        return prod(tiles[:-1]) == 1 and (tiles[-1] == 1 or len(self._tiled) == 2)

    @property
    def data(self) -> NkiTensor:
        """The selection as a tensor; NkiValidationError if no one pattern covers it."""
        if not self.is_data_representable:
            raise NkiValidationError(
                f".data of a grid of {self.shape} cells of {self.backing.name!r}: no one access "
                f"pattern covers them; index the grid and use each cell{at_kernel_line()}"
            )
        if self.packed is not None:
            return self._packed_data(self.packed)
        return self.backing[tuple(_key(axis) for axis in self.axes)]

    def _packed_data(self, counts: tuple[int, ...]) -> NkiTensor:
        number = 0
        for axis, count in zip(self.axes, counts, strict=True):
            number = number * count + axis.first // axis.tile
        tiled = self._tiled
        free = prod(axis.tile for axis in tiled[1:])
        rows, width = tiled[0].elements, tiled[-1].elements
        if len(tiled) == 2:
            return self.backing[:rows, number * free : number * free + width]
        whole = self.backing[:rows, number * free : (number + 1) * free]
        shaped = whole.reshape((rows, *(axis.tile for axis in tiled[1:])))
        return shaped[(slice(None), *(slice(0, axis.elements) for axis in tiled[1:]))]

    def with_axes(self, axes: Sequence[Axis], kind: type[NkiGrid] | None = None) -> Any:
        """The same tensor with other cells, as a grid of `kind` (None: this one's)."""
        return (kind or type(self))(backing=self.backing, axes=tuple(axes), packed=self.packed)

    def __getitem__(self, key: Any) -> Any:
        """A grid of the cells that integers and slices of positive step select."""
        keys = list(key) if isinstance(key, tuple) else [key]
        if len(keys) > len(self.shape):
            raise NkiValidationError(
                f"index {key!r} has {len(keys)} entries for a grid of shape {self.shape}"
                f"{at_kernel_line()}"
            )
        keys += [slice(None)] * (len(self.shape) - len(keys))
        axes = []
        for axis in self.axes:
            axes.append(axis if axis.consumed else _selected(axis, keys.pop(0)))
        return self.with_axes(axes)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.backing.name!r}, shape={self.shape}, "
            f"tile_shape={self.tile_shape}, element_shape={self.element_shape})"
        )


class NkiTileGrid(NkiGrid):
    """A tensor in tile coordinates."""

    __slots__ = ()


class NkiBlockGrid(NkiGrid):
    """A tensor in block coordinates; a block is a group of tiles."""

    __slots__ = ()

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Tiles of a whole block."""
        return tuple(axis.cell for axis in self._tiled)


def _key(axis: Axis) -> int | slice:
    """The index of the backing tensor that selects an axis of neighbours."""
    if axis.consumed and not axis.tiled:
        return axis.first
    if axis.step > 1 and axis.count > 1:  # cells of one element
        return slice(axis.first, axis.end, axis.step)
    return slice(axis.first, axis.first + axis.elements)


def _selected(axis: Axis, key: Any) -> Axis:
    if isinstance(key, slice):
        cells = range(*key.indices(axis.count))
        if not cells or cells.step < 1:
            raise NkiValidationError(
                f"slice {key} of {axis.count} cells selects nothing or counts down; allowed: at "
                f"least one cell, a step of at least 1{at_kernel_line()}"
            )
        return axis.between(cells)
    if isinstance(key, bool) or not isinstance(key, SupportsIndex):
        raise NkiValidationError(
            f"index {key!r} of a grid; allowed: integers and slices{at_kernel_line()}"
        )
    index = key.__index__()
    if not -axis.count <= index < axis.count:
        raise NkiValidationError(f"index {index} of {axis.count} cells{at_kernel_line()}")
    return axis.at(index % axis.count)
