"""nl.tiles, nl.blocks, nl.alloc_tiles, nl.alloc_blocks and nl.empty_like."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from ..errors import NkiValidationError
from ..regions import HBM, MemoryRegion
from ..tensor import NkiTensor
from .creation import allocate
from .grids import Axis, NkiBlockGrid, NkiGrid, NkiTileGrid


def _sizes(function: str, parameter: str, shape: Any) -> tuple[int, ...]:
    """A shape; TypeError unless a tuple of ints, ValueError for a size below 1."""
    if not isinstance(shape, tuple) or any(type(n) is not int for n in shape):
        raise TypeError(f"{function}: {parameter} is {shape!r}; allowed: a tuple of ints")
    if any(n < 1 for n in shape):
        raise ValueError(f"{function}: {parameter} is {shape}; allowed: sizes of at least 1")
    return shape


def _axes(function: str, extents: tuple[int, ...], tile: Any) -> tuple[Axis, ...]:
    """Tiles on the trailing dimensions; the ones before are untiled."""
    tile = _sizes(function, "tile_shape", tile)
    if not 2 <= len(tile) <= len(extents):
        raise ValueError(
            f"{function}: tile_shape {tile} for a shape of {extents}; allowed: 2 to "
            f"{len(extents)} dimensions"
        )
    untiled = len(extents) - len(tile)
    plain = [Axis(1, 1, 0, n, n, tiled=False) for n in extents[:untiled]]
    pairs = zip(tile, extents[untiled:], strict=True)
    return (*plain, *(Axis(t, 1, 0, n, ceil(n / t)) for t, n in pairs))


def tiles(source: NkiTensor | NkiGrid, *, tile_shape: tuple[int, ...] | None = None) -> NkiTileGrid:
    """A tensor, or what a grid selects, as a grid of tiles; nothing is copied.

    `tile_shape` is needed for a tensor; for a grid None keeps its tiles.
    """
    if isinstance(source, NkiGrid):
        if tile_shape is None or tile_shape == source.tile_shape:
            axes = [axis.regrouped(1) if axis.tiled else axis for axis in source.axes]
            made: NkiTileGrid = source.with_axes(axes, NkiTileGrid)
            return made
        source = source.data
    axes_of = _axes("nl.tiles", source.shape, tile_shape)
    if source.buffer not in HBM and not axes_of[0].tiled:
        raise ValueError(
            f"nl.tiles: tile_shape {tile_shape} of {source.name!r} in {source.buffer.value} with "
            f"shape {source.shape}; only HBM tensors have untiled dimensions"
        )
    return NkiTileGrid(backing=source, axes=axes_of, packed=None)


def blocks(
    source: NkiTensor | NkiGrid,
    *,
    tile_shape: tuple[int, ...] | None = None,
    block_shape: tuple[int, ...],
) -> NkiBlockGrid:
    """A tensor, or what a grid selects, as a grid of blocks of `block_shape` tiles each."""
    grid = tiles(source, tile_shape=tile_shape)
    sizes = list(_sizes("nl.blocks", "block_shape", block_shape))
    if len(sizes) != len(grid.tile_shape):
        raise ValueError(
            f"nl.blocks: block_shape {block_shape} for tiles of {grid.tile_shape}; the ranks must "
            "agree"
        )
    axes = [axis.regrouped(sizes.pop(0)) if axis.tiled else axis for axis in grid.axes]
    made: NkiBlockGrid = grid.with_axes(axes, NkiBlockGrid)
    return made


def alloc_tiles(
    *,
    tile_shape: tuple[int, ...],
    element_shape: tuple[int, ...],
    buffer: MemoryRegion,
    dtype: str,
    address: tuple[int, ...] | None = None,
    name: str = "",
) -> NkiTileGrid:
    """A new uninitialised tensor of `element_shape` as a grid of tiles.

    TypeError for a shape that is no tuple of ints or a buffer that is none, ValueError for sizes
    below 1 and ranks that do not fit.
    """
    me = "nl.alloc_tiles"
    extents = _sizes(me, "element_shape", element_shape)
    axes = _axes(me, extents, tile_shape)
    if not isinstance(buffer, MemoryRegion):
        raise TypeError(
            f"{me}: buffer is {buffer!r}; allowed: nl.shared_hbm, nl.sbuf, nl.psum, ..."
        )
    if buffer in HBM:
        backing = allocate(extents, dtype, buffer, name, address)
        return NkiTileGrid(backing=backing, axes=axes, packed=None)
    counts = tuple(axis.count for axis in axes)
    shape = tile_shape[0], prod(counts) * prod(tile_shape[1:])
    backing = allocate(shape, dtype, buffer, name, address)
    return NkiTileGrid(backing=backing, axes=axes, packed=counts)


def alloc_blocks(
    *,
    tile_shape: tuple[int, ...],
    block_shape: tuple[int, ...],
    element_shape: tuple[int, ...],
    buffer: MemoryRegion,
    dtype: str,
    address: tuple[int, ...] | None = None,
    name: str = "",
) -> NkiBlockGrid:
    """A new uninitialised tensor as a grid of blocks; its tiles lie as those of alloc_tiles."""
    grid = alloc_tiles(
        tile_shape=tile_shape,
        element_shape=element_shape,
        buffer=buffer,
        dtype=dtype,
        address=address,
        name=name,
    )
    return blocks(grid, block_shape=block_shape)


_TRANSPOSES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def empty_like(
    x: NkiTensor | NkiGrid,
    dtype: Any = None,
    buffer: MemoryRegion | None = None,
    name: str = "",
    *,
    transpose_axes: tuple[int, ...] | None = None,
    address: tuple[int, ...] | None = None,
) -> Any:
    """An uninitialised tensor or grid with the shape (and dtype, buffer unless given) of x.

    Cells that a slice picked with gaps lie side by side in it. `transpose_axes` makes the SBUF
    destination of an nisa.dma_transpose of x with these axes.
    """
    shape = x.element_shape if isinstance(x, NkiGrid) else x.shape
    order = tuple(range(len(shape)))
    region = buffer or x.buffer
    if transpose_axes is not None:
        order, region = transpose_axes, buffer or MemoryRegion.sbuf
        if order != _TRANSPOSES.get(len(shape)):
            raise NkiValidationError(
                f"nl.empty_like: transpose_axes {order} for {len(shape)} dimensions; allowed: "
                f"{_TRANSPOSES.get(len(shape), 'two to four dimensions')}"
            )
        partitions = x.tile_shape[order[0]] if isinstance(x, NkiGrid) else shape[order[0]]
        if region is not MemoryRegion.sbuf or partitions > 128:
            raise NkiValidationError(
                f"nl.empty_like: a transposed destination of {partitions} partitions in "
                f"{region.value}; allowed: at most 128 in sbuf"
            )
    if not isinstance(x, NkiGrid):
        turned = tuple(shape[axis] for axis in order)
        return allocate(turned, dtype or x.dtype, region, name, address)
    if transpose_axes is not None and len(x.tile_shape) != len(shape):
        raise NkiValidationError("nl.empty_like: transpose_axes of a grid with untiled dimensions")
    kept = [axis for axis in x.axes if axis.tiled or not axis.consumed]
    turned_axes = [kept[axis] for axis in order]
    grid: Any = alloc_tiles(
        tile_shape=tuple(axis.tile for axis in turned_axes if axis.tiled),
        element_shape=tuple(axis.elements for axis in turned_axes),
        buffer=region,
        dtype=dtype or x.dtype,
        address=address,
        name=name,
    )
    if isinstance(x, NkiBlockGrid):
        grid = blocks(grid, block_shape=tuple(axis.cell for axis in turned_axes if axis.tiled))
    return grid[tuple(0 if axis.consumed else slice(None) for axis in turned_axes)]
