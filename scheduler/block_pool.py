"""The physical blocks: which are free, in what order they are taken, who owns and finds them."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ..reference.paging import NULL_BLOCK_ID


class BlockPool:
    """Reference counts, free list and prefix index of `num_blocks` blocks, the null block included.

    A cached block has the digest of the prefix that it ends. It stays findable while it is free;
    taking it for new tokens evicts it. A digest may belong to several blocks; the earliest is
    found.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        """Blocks without owner, in the order in which they are taken."""
        self.block_hash: list[bytes | None] = [None] * num_blocks
        """Digest of each cached block."""
        self._first: dict[bytes, int] = {}
        self._others: dict[bytes, list[int]] = {}

    def take(self, num_blocks: int) -> list[int]:
        """Take `num_blocks` blocks from the head of the free list; their old content is evicted.

        Raises ValueError when fewer are free.
        """
        if num_blocks > len(self.free):
            raise ValueError(f"num_blocks={num_blocks}: only {len(self.free)} are free")
        pop, ref_counts, block_hash = self.free.popitem, self.ref_counts, self.block_hash
        blocks = [pop(last=False)[0] for _ in range(num_blocks)]
        for block in blocks:
            ref_counts[block] = 1
            if block_hash[block] is not None:
                self._evict(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add an owner to each of `blocks`; those that were free leave the free list."""
        ref_counts, free = self.ref_counts, self.free
        for block in blocks:
            ref_counts[block] += 1
            if ref_counts[block] == 1:
                del free[block]

    def release(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Take an owner from each block of some requests, one request after the other.

        Blocks without an owner become free: uncached ones at the head of the free list, cached ones
        at its tail. A request's last block comes first in either case, since a prefix serves more
        requests the shorter it is.
        """
        ref_counts, free, block_hash = self.ref_counts, self.free, self.block_hash
        for table in block_tables:
            uncached = []
            for block in reversed(table):
                ref_counts[block] = count = ref_counts[block] - 1
                if not count:
                    free[block] = None
                    if block_hash[block] is None:
                        uncached.append(block)
            for block in reversed(uncached):
                free.move_to_end(block, last=False)

    def num_unowned(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are free."""
        return list(map(self.ref_counts.__getitem__, blocks)).count(0)

    def find_longest_hit(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached chain."""
        # A loop in C that ends at the first None.
        return list(iter(map(self._first.get, digests).__next__, None))

    def insert(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Let uncached blocks be found under their digests."""
        first, block_hash = self._first, self.block_hash
        for block, digest in zip(blocks, digests, strict=True):
            block_hash[block] = digest
            if first.setdefault(digest, block) != block:
                self._others.setdefault(digest, []).append(block)

    def forget(self, cached: Iterable[tuple[int, bytes]]) -> None:
        """Clear `block_hash` of those blocks that are still cached so; `rebuild` must follow."""
        for block, digest in cached:
            if self.block_hash[block] == digest:
                self.block_hash[block] = None

    def evict(self, cached: Iterable[tuple[int, bytes]]) -> None:
        """Let nobody find those blocks any more that are still cached so."""
        for block, digest in cached:
            if self.block_hash[block] == digest:
                self._evict(block)

    def clear(self) -> None:
        """Evict every block; the free list keeps its order."""
        self.block_hash = [None] * self.num_blocks
        self._first, self._others = {}, {}

    def blocks_by_digest(self) -> dict[bytes, list[int]]:
        """The cached blocks of each prefix, in the order in which they are found."""
        return {digest: [b, *self._others.get(digest, ())] for digest, b in self._first.items()}

    def rebuild(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Derive everything anew from the block tables of all owners and from `block_hash`.

        For a state that a failure caught half changed. Free blocks keep their order, lost ones come
        first.
        """
        self.ref_counts = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                self.ref_counts[block] += 1
        for block in range(NULL_BLOCK_ID + 1, self.num_blocks):
            if self.ref_counts[block]:
                self.free.pop(block, None)
            elif block not in self.free:
                self.free[block] = None
                self.free.move_to_end(block, last=False)
        cached = [(b, digest) for b, digest in enumerate(self.block_hash) if digest is not None]
        self._first, self._others = {}, {}
        for block, digest in cached:
            self.insert([block], [digest])

    def _evict(self, block: int) -> None:
        digest = self.block_hash[block]
        assert digest is not None
        others = self._others.get(digest)
        if others is None:
            del self._first[digest]
        elif self._first[digest] == block:
            self._first[digest] = others.pop(0)
        else:
            others.remove(block)
        if others == []:
            del self._others[digest]
        self.block_hash[block] = None
