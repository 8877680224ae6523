"""Which block holds which prefix, by content."""

from collections.abc import Iterable, Sequence
from itertools import islice

from .prefix_digests import PrefixDigests, RecentPrompts
from .transaction import Transaction


class PrefixCache:
    """Digest to block and back. A digest may belong to several blocks; the earliest is found.

    Blocks of a request are cached without digests while nobody else asks for or brings a prefix
    with the same first block. Their digests are computed at the first such call, before anything
    else is found or cached, so what is found does not depend on when that is.
    """

    def __init__(self, num_blocks: int, transaction: Transaction) -> None:
        self.block_hash: list[bytes | None] = [None] * num_blocks
        """Digest of each block's content, None when it is not cached. An unhashed block has the
        digest of its prefix's first block, which is never unhashed itself."""
        self._first: dict[bytes, int] = {}
        self._others: dict[bytes, list[int]] = {}
        self._unhashed: dict[bytes, PrefixDigests] = {}
        """By the digest of the first block, the prefix that has unhashed blocks: at most one."""
        self._recent_prompts = RecentPrompts()
        self._transaction = transaction

    def prepare(self, prefix: PrefixDigests) -> None:
        """Hash a new prefix at once if its first block is cached: it will be asked for.

        Then its packed tokens need not be kept.
        """
        if prefix.digests and prefix.digests[0] in self._first:
            prefix.set_digests(self._recent_prompts.all_digests(prefix))

    def find_longest_hit(self, prefix: PrefixDigests, max_blocks: int) -> list[int]:
        """Blocks of the longest cached chain, at most `max_blocks` of them."""
        if not max_blocks or prefix.digests[0] not in self._first:
            return []
        self._hash_blocks_like(prefix)
        self._hash(prefix)
        found = map(self._first.get, islice(prefix.digests, max_blocks))
        # A loop in C that ends at the first None.
        return list(iter(found.__next__, None))

    def insert(self, blocks: Sequence[int], prefix: PrefixDigests, begin: int) -> None:
        """Cache uncached blocks, which hold `prefix` from its `begin`-th block on."""
        first_digest = prefix.digests[0]
        if begin == 0 or self._unhashed.get(first_digest) is not prefix:
            self._hash_blocks_like(prefix)
        if prefix.packed is None:
            self._insert_hashed(blocks, prefix.digests[begin : begin + len(blocks)])
            return
        if begin == 0:
            self._insert_hashed(blocks[:1], [first_digest])
            blocks = blocks[1:]
        if blocks:
            self._transaction.record(
                (self._undo_insert_unhashed, blocks, prefix, len(prefix.unhashed))
            )
            self._unhashed[first_digest] = prefix
            prefix.unhashed += blocks
            block_hash = self.block_hash
            for block in blocks:
                block_hash[block] = first_digest

    def evict(self, blocks: Iterable[int]) -> None:
        """Forget cached blocks; unhashed ones of a prefix from its end, as requests free them."""
        first, others, block_hash = self._first, self._others, self.block_hash
        evicted: list[tuple[int, bytes, int]] = []
        unhashed: list[tuple[int, PrefixDigests, int]] = []
        self._transaction.record((self._undo_evict, evicted, unhashed))
        for block in blocks:
            digest = block_hash[block]
            if digest is None:
                raise ValueError(f"block={block} is not cached")
            prefix = self._unhashed.get(digest)
            if prefix is not None and prefix.unhashed[-1] == block:
                unhashed.append((block, prefix, len(prefix.unhashed) - 1))
                block_hash[block] = None
                prefix.unhashed.pop()
                if not prefix.unhashed:
                    del self._unhashed[digest]
                continue
            rank = 0 if first[digest] == block else 1 + others[digest].index(block)
            evicted.append((block, digest, rank))
            block_hash[block] = None
            if digest not in others:
                del first[digest]
                continue
            if rank == 0:
                first[digest] = others[digest].pop(0)
            else:
                del others[digest][rank - 1]
            if not others[digest]:
                del others[digest]

    def forget(self, cached: Iterable[tuple[int, PrefixDigests]]) -> None:
        """Evict those blocks that still hold what they were cached with."""
        for prefix in [*self._unhashed.values()]:
            self._hash_blocks_like(prefix)
        for block, prefix in cached:
            if self.block_hash[block] in prefix.all_digests():
                self.evict([block])

    def clear(self) -> None:
        """Forget every block."""
        unhashed = self._unhashed
        self._transaction.record(
            (
                self._undo_clear,
                self.block_hash.copy(),
                self._first,
                self._others,
                unhashed,
                {digest: prefix.unhashed for digest, prefix in unhashed.items()},
            )
        )
        self.block_hash[:] = [None] * len(self.block_hash)
        self._first, self._others, self._unhashed = {}, {}, {}
        for prefix in unhashed.values():
            prefix.unhashed = []

    def blocks_by_digest(self) -> dict[bytes, list[int]]:
        """The cached blocks of each prefix, in the order in which they are found.

        For checks: digests of unhashed blocks are computed and not kept.
        """
        blocks = {
            digest: [block, *self._others.get(digest, ())] for digest, block in self._first.items()
        }
        for prefix in self._unhashed.values():
            for digest, block in zip(prefix.all_digests()[1:], prefix.unhashed, strict=False):
                blocks.setdefault(digest, []).append(block)
        return blocks

    def unhashed_prefixes(self) -> dict[bytes, PrefixDigests]:
        """Prefixes that have unhashed blocks, by the digest of their first block."""
        return self._unhashed

    def _hash_blocks_like(self, prefix: PrefixDigests) -> None:
        """Hash the unhashed blocks of the prefix that begins like `prefix`, if there is one."""
        first_digest = prefix.digests[0]
        owner = self._unhashed.get(first_digest)
        if owner is None:
            return
        self._hash(owner)
        unhashed = owner.unhashed
        self._transaction.record((self._undo_hash_blocks, owner, unhashed))
        del self._unhashed[first_digest]
        owner.unhashed = []
        self._insert_hashed(unhashed, owner.digests[1 : 1 + len(unhashed)])

    def _hash(self, prefix: PrefixDigests) -> None:
        if prefix.packed is not None:
            self._transaction.record((prefix.set_digests, prefix.digests, prefix.packed))
            prefix.set_digests(self._recent_prompts.all_digests(prefix))

    def _insert_hashed(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Let blocks be found under their digests, which are different from each other."""
        first, block_hash = self._first, self.block_hash
        self._transaction.record((self._undo_insert_hashed, blocks, digests))
        for block, digest in zip(blocks, digests, strict=True):
            block_hash[block] = digest
            if first.setdefault(digest, block) != block:
                self._others.setdefault(digest, []).append(block)

    def _undo_insert_unhashed(
        self, blocks: Sequence[int], prefix: PrefixDigests, num_unhashed: int
    ) -> None:
        for block in blocks:
            self.block_hash[block] = None
        del prefix.unhashed[num_unhashed:]
        if not num_unhashed:
            self._unhashed.pop(prefix.digests[0], None)

    def _undo_insert_hashed(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        for block, digest in zip(blocks, digests, strict=True):
            self._set_blocks(digest, self._blocks_of(digest, block))
            self.block_hash[block] = None

    def _undo_hash_blocks(self, prefix: PrefixDigests, unhashed: list[int]) -> None:
        first_digest = prefix.digests[0]
        for block in unhashed:
            self.block_hash[block] = first_digest
        prefix.unhashed = unhashed
        self._unhashed[first_digest] = prefix

    def _undo_evict(
        self, evicted: list[tuple[int, bytes, int]], unhashed: list[tuple[int, PrefixDigests, int]]
    ) -> None:
        for block, digest, rank in reversed(evicted):
            blocks = self._blocks_of(digest, block)
            blocks.insert(rank, block)
            self._set_blocks(digest, blocks)
            self.block_hash[block] = digest
        for block, prefix, place in reversed(unhashed):
            first_digest = prefix.digests[0]
            self.block_hash[block] = first_digest
            prefix.unhashed[place:] = [block]
            self._unhashed[first_digest] = prefix

    def _undo_clear(
        self,
        block_hash: list[bytes | None],
        first: dict[bytes, int],
        others: dict[bytes, list[int]],
        unhashed: dict[bytes, PrefixDigests],
        unhashed_blocks: dict[bytes, list[int]],
    ) -> None:
        self.block_hash[:] = block_hash
        self._first, self._others, self._unhashed = first, others, unhashed
        for digest, blocks in unhashed_blocks.items():
            unhashed[digest].unhashed = blocks

    def _blocks_of(self, digest: bytes, without: int) -> list[int]:
        """Hashed blocks of a digest but one."""
        if digest not in self._first:
            return []
        blocks = [self._first[digest], *self._others.get(digest, ())]
        return [block for block in blocks if block != without]

    def _set_blocks(self, digest: bytes, blocks: list[int]) -> None:
        self._first.pop(digest, None)
        self._others.pop(digest, None)
        if blocks:
            self._first[digest] = blocks[0]
        if len(blocks) > 1:
            self._others[digest] = blocks[1:]
