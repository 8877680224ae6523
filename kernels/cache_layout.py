"""Strided views of caches as the kernels address them: pages of memory, without a copy.

A kernel takes a C-contiguous cache [pages, KV, page_size, d]. The caches of a caller may be views
of larger buffers: block-interleaved (`kv[:, 0]` of [num_blocks, 2, ...]), or with tokens outside of
heads (NHD, as `cache.swapaxes(1, 2)`), or both. Such a view is the same memory in pages:

    tokens of a head follow each other    a page is a block, `step` pages from one to the next
    heads of a token follow each other    a page is a token, `page_count` of them in a block

so that block tables and slots in pages, made here, are all that changes. Pages that no block names
belong to others: they are neither read nor written.
"""

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..reference.paging import PAD_SLOT_ID, UNUSED_BLOCK
from .arrays import Array

MOST_ELEMENTS = 2**31
"""Offsets in HBM are 32-bit numbers."""


@dataclass(frozen=True)
class Layout:
    """Where the blocks of a cache are, in pages."""

    page_count: int
    """Pages of a block."""
    step: int
    """Pages from one block to the next; negative in a reversed view."""
    first: int
    """Page at which block 0 begins."""


@dataclass(frozen=True)
class PagedCaches:
    """K and V caches as the kernels take them."""

    k: Array
    """[pages, KV, page_size, d], with k_pre_transposed [pages, KV, d, page_size]."""
    v: Array
    """[pages, KV, page_size, d]."""
    layout: Layout

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self.v.shape[2])

    def tables(self, blocks: Array) -> Array:
        """Block tables [B, W] as tables of pages [B, W * page_count]; -1 stays -1."""
        own = self.layout
        if own == Layout(1, 1, 0):
            return blocks
        pages = (blocks * own.step + own.first)[..., None] + np.arange(own.page_count)
        pages = np.where(blocks[..., None] == UNUSED_BLOCK, UNUSED_BLOCK, pages)
        return pages.reshape(len(blocks), -1).astype(np.int32)

    def slots(self, slots: Array) -> Array:
        """Slots [T] of the caches as those of pages; -1 stays -1."""
        own = self.layout
        blocks, places = np.divmod(slots, self.page_size * own.page_count)
        pages = (blocks * own.step + own.first) * self.page_size + places
        return np.where(slots == PAD_SLOT_ID, PAD_SLOT_ID, pages).astype(np.int32)


def read_in_place(k_cache: Array, v_cache: Array, k_pre_transposed: bool) -> PagedCaches:
    """Caches [num_blocks, KV, block_size, d] of any strides; copies where they are no pages.

    ValueError where they span 2**31 elements.
    """
    layout = _layout_of(k_cache, k_pre_transposed)
    if layout is None or layout != _layout_of(v_cache, False):
        k_cache, v_cache = np.ascontiguousarray(k_cache), np.ascontiguousarray(v_cache)
        layout = Layout(1, 1, 0)
    return _paged(k_cache, v_cache, layout)


def written_in_place(k_cache: Array, v_cache: Array, k_pre_transposed: bool) -> PagedCaches:
    """The same caches, to be written; ValueError where they are no pages, or overlap."""
    layout = _layout_of(k_cache, k_pre_transposed)
    for name, cache, own in (
        ("k_cache", k_cache, layout),
        ("v_cache", v_cache, _layout_of(v_cache, False)),
    ):
        if not cache.flags.writeable:
            raise ValueError(f"{name}: is read-only, must be writeable")
        if own is None or abs(own.step) < own.page_count:
            raise ValueError(
                f"{name}: strides {cache.strides} of shape {cache.shape} must be those of blocks "
                "whose tokens of a head, or heads of a token, follow each other, a whole number of "
                "them from one block to the next"
            )
    if layout is None or layout != _layout_of(v_cache, False):
        raise ValueError(
            f"v_cache: strides {v_cache.strides} must be those of k_cache, {k_cache.strides}"
        )
    if np.shares_memory(k_cache, v_cache):
        raise ValueError("v_cache: shares memory with k_cache, must be an array of its own")
    return _paged(k_cache, v_cache, layout)


def _layout_of(cache: Array, pre_transposed: bool) -> Layout | None:
    """Of a cache [num_blocks, KV, n, m] whose last axis is dense; None: it has no pages."""
    num_blocks, heads, rows, width = cache.shape
    size = cache.itemsize
    block, head, row, element = (
        stride if count > 1 else None
        for stride, count in zip(cache.strides, cache.shape, strict=True)
    )

    def is_page(heads_stride: int, rows_stride: int) -> bool:
        found = ((head, heads_stride), (row, rows_stride), (element, 1))
        return all(stride in (None, expected * size) for stride, expected in found)

    if is_page(rows * width, width):
        count, page = 1, heads * rows * width * size
    elif is_page(width, heads * width) and not pre_transposed:
        count, page = rows, heads * width * size
    else:
        return None
    if block is None:
        return Layout(count, count, 0)
    step, rest = divmod(block, page)
    return None if rest else Layout(count, step, max(0, (1 - num_blocks) * step))


def _paged(k_cache: Array, v_cache: Array, layout: Layout) -> PagedCaches:
    """Both caches in one layout."""
    num_pages = (len(v_cache) - 1) * abs(layout.step) + layout.page_count
    paged = []
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _, heads, rows, width = cache.shape
        shape = (num_pages, heads, rows, width)
        if layout.page_count > 1:
            shape = (num_pages, heads, 1, width)
        if np.prod(shape, dtype=np.int64) >= MOST_ELEMENTS:
            raise ValueError(
                f"{name}: {np.prod(shape, dtype=np.int64)} elements from its first to its last, "
                "must be below 2**31"
            )
        lowest = cache if layout.step >= 0 else cache[::-1]
        strides = np.cumprod([cache.itemsize, *shape[:0:-1]])[::-1]
        # As integers: NumPy does not stride every dtype of ml_dtypes.
        words = lowest.view(f"u{cache.itemsize}")
        pages = as_strided(words, shape, [int(each) for each in strides])
        paged.append(pages.view(cache.dtype))
    return PagedCaches(paged[0], paged[1], layout)
