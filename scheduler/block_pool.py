"""The physical blocks: which are free, in which order they are taken, and who counts on them."""

from collections.abc import Iterator, Sequence

from ..reference.paging import NULL_BLOCK_ID
from .prefix_cache import PrefixCache
from .transaction import Transaction


class BlockPool:
    """Reference counts and the free list of `num_blocks` blocks, the null block included.

    The free list is a ring through `_next` and `_previous`, closed by the null block, which is
    never free itself: `_next[NULL_BLOCK_ID]` is taken first. A cached block stays findable while it
    is free; taking it for new tokens evicts it.
    """

    def __init__(
        self, num_blocks: int, prefix_cache: PrefixCache | None, transaction: Transaction
    ) -> None:
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks - 1
        """Blocks that can be taken; cached ones that nobody uses count."""
        self.ref_counts = [0] * num_blocks
        self._next = [(block + 1) % num_blocks for block in range(num_blocks)]
        self._previous = [(block - 1) % num_blocks for block in range(num_blocks)]
        self._prefix_cache = prefix_cache
        self._transaction = transaction

    def free_list(self) -> list[int]:
        """Free blocks in the order in which they would be taken."""
        return [block for _, block in self.free_links()][:-1]

    def free_links(self) -> Iterator[tuple[int, int]]:
        """Neighbours in the free list, from the null block before it to the one behind it."""
        before, block = NULL_BLOCK_ID, self._next[NULL_BLOCK_ID]
        while block != NULL_BLOCK_ID:
            yield before, block
            before, block = block, self._next[block]
        yield before, block

    def is_linked(self, before: int, block: int) -> bool:
        """Whether `before` precedes `block` in both directions of the ring."""
        return self._next[before] == block and self._previous[block] == before

    def take(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks from the head of the free list; their old content is evicted.

        Raises ValueError when fewer are free.
        """
        if num_blocks > self.num_free_blocks:
            raise ValueError(f"num_blocks={num_blocks}: only {self.num_free_blocks} are free")
        following, ref_counts = self._next, self.ref_counts
        block = NULL_BLOCK_ID
        blocks = [block := following[block] for _ in range(num_blocks)]
        after = following[block]
        self._transaction.record((self._undo_take, blocks, after, self.num_free_blocks))
        following[NULL_BLOCK_ID] = after
        self._previous[after] = NULL_BLOCK_ID
        self.num_free_blocks -= num_blocks
        for block in blocks:
            ref_counts[block] = 1
        if self._prefix_cache is not None:
            block_hash = self._prefix_cache.block_hash
            cached = [block for block in blocks if block_hash[block] is not None]
            if cached:
                self._prefix_cache.evict(cached)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to each of `blocks`; those that were free leave the free list."""
        ref_counts = self.ref_counts
        counts = self.ref_counts_of(blocks)
        unlinked: list[tuple[int, int, int]] = []
        self._transaction.record((self._undo_share, blocks, counts, unlinked, self.num_free_blocks))
        for block, count in zip(blocks, counts, strict=True):
            ref_counts[block] = count + 1
        if 0 not in counts:
            return
        following, previous = self._next, self._previous
        for block, count in zip(blocks, counts, strict=True):
            if count == 0:
                before, after = previous[block], following[block]
                unlinked.append((before, block, after))
                following[before] = after
                previous[after] = before
        self.num_free_blocks -= len(unlinked)

    def release(self, blocks: Sequence[int], num_cached: int) -> None:
        """Take an owner from each of a request's `blocks`, given in the order of its tokens.

        The first `num_cached` are cached; the others are not, and have no other owner. Those
        without an owner become free: uncached ones at the head of the free list, cached ones at its
        tail. The request's last block comes first in either case, since a prefix serves more
        requests the shorter it is.
        """
        ref_counts = self.ref_counts
        counts = self.ref_counts_of(blocks)
        head, tail = self._next[NULL_BLOCK_ID], self._previous[NULL_BLOCK_ID]
        self._transaction.record(
            (self._undo_release, blocks, counts, head, tail, self.num_free_blocks)
        )
        for block, count in zip(blocks, counts, strict=True):
            ref_counts[block] = count - 1
        uncached = blocks[num_cached:]
        cached = blocks[:num_cached]
        if counts.count(1) < len(counts):
            cached = [block for block, count in zip(cached, counts, strict=False) if count == 1]
        if uncached:
            self._chain(NULL_BLOCK_ID, uncached[::-1], head)
        if cached:
            self._chain(self._previous[NULL_BLOCK_ID], cached[::-1], NULL_BLOCK_ID)
        self.num_free_blocks += len(uncached) + len(cached)

    def ref_counts_of(self, blocks: Sequence[int]) -> list[int]:
        """How many requests own each of `blocks`."""
        return list(map(self.ref_counts.__getitem__, blocks))

    def _chain(self, before: int, blocks: Sequence[int], after: int) -> None:
        """Put `blocks` between `before` and `after`, two neighbours of the ring."""
        following, previous = self._next, self._previous
        for block in blocks:
            following[before] = block
            previous[block] = before
            before = block
        following[before] = after
        previous[after] = before

    def _undo_take(self, blocks: Sequence[int], after: int, num_free_blocks: int) -> None:
        self._set_ref_counts(blocks, [0] * len(blocks))
        self._chain(NULL_BLOCK_ID, blocks, after)
        self.num_free_blocks = num_free_blocks

    def _undo_share(
        self,
        blocks: Sequence[int],
        ref_counts: Sequence[int],
        unlinked: Sequence[tuple[int, int, int]],
        num_free_blocks: int,
    ) -> None:
        self._set_ref_counts(blocks, ref_counts)
        for before, block, after in reversed(unlinked):
            self._chain(before, (block,), after)
        self.num_free_blocks = num_free_blocks

    def _undo_release(
        self,
        blocks: Sequence[int],
        ref_counts: Sequence[int],
        head: int,
        tail: int,
        num_free_blocks: int,
    ) -> None:
        self._set_ref_counts(blocks, ref_counts)
        self._chain(tail, (NULL_BLOCK_ID,), head)
        self.num_free_blocks = num_free_blocks

    def _set_ref_counts(self, blocks: Sequence[int], ref_counts: Sequence[int]) -> None:
        for block, count in zip(blocks, ref_counts, strict=True):
            self.ref_counts[block] = count
