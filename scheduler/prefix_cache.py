"""Which block holds which prefix, by content."""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import islice
from sys import byteorder

from .transaction import Transaction

_TOKEN_BYTES = 4
MAX_TOKEN_ID = 2 ** (8 * _TOKEN_BYTES - 1) - 1
"""Largest token id; tensors of token ids are int32."""
_SIGN_BYTES = slice(_TOKEN_BYTES - 1 if byteorder == "little" else 0, None, _TOKEN_BYTES)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as consecutive int32. ValueError for anything else than 0..`MAX_TOKEN_ID`."""
    try:
        # Of all ways that the standard library offers, the one that reads a list fastest.
        data = array("I", token_ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers within 0..{MAX_TOKEN_ID}") from error
    # A byte is ASCII when its highest bit is clear: the sign of every token at C speed.
    if not data[_SIGN_BYTES].isascii():
        raise ValueError(f"token id {max(token_ids)}: must be within 0..{MAX_TOKEN_ID}")
    return data


class PrefixHasher:
    """Digests of one request's blocks, each over all tokens up to the block's end.

    SHA-256, as in vLLM: equal digests stand for equal prefixes, and no prompt can be made up to hit
    the blocks of another, which Python's `hash` would allow. Requests of different salts share
    nothing.
    """

    __slots__ = ("_running", "_stride")

    def __init__(self, block_size: int, cache_salt: str | None) -> None:
        self._stride = block_size * _TOKEN_BYTES
        # As many bytes with a salt as without, or tokens could stand for a salt.
        salt = sha256(cache_salt.encode()).digest() if cache_salt else bytes(32)
        self._running = sha256(salt)

    def __deepcopy__(self, memo: dict[int, object]) -> "PrefixHasher":
        return self.copy()

    def copy(self) -> "PrefixHasher":
        """A hasher that goes on from here on its own."""
        other = PrefixHasher.__new__(PrefixHasher)
        other._stride = self._stride
        other._running = self._running.copy()
        return other

    def digests(self, packed: bytes, begin: int = 0) -> list[bytes]:
        """Digests of the next full blocks, at byte `begin` of packed tokens.

        What is left over is not taken in.
        """
        update, digest, stride = self._running.update, self._running.digest, self._stride
        digests = []
        for start in range(begin, len(packed) - stride + 1, stride):
            update(packed[start : start + stride])
            digests.append(digest())
        return digests

    def skip(self, packed: bytes) -> None:
        """Take packed tokens in whose digests are known."""
        self._running.update(packed)


class RecentPrompts:
    """The latest prompts of different first blocks with their digests.

    A prompt that begins like one of them takes the digests of the blocks they share, so only the
    rest of it is hashed block by block. Only the first block is kept until it comes again: most
    prompts are like no other. Each entry holds 4 bytes per token and 8 per block, and keeps the
    digests alive.
    """

    _MAX_PROMPTS = 16

    def __init__(self, block_size: int) -> None:
        self._stride = block_size * _TOKEN_BYTES
        # By the digest of the first block, which tells salts apart; the oldest comes first.
        self._prompts: dict[bytes, tuple[bytes, list[bytes]]] = {}

    def digests(self, hasher: PrefixHasher, packed: bytes) -> list[bytes]:
        """Digests of a packed prompt's full blocks from a new `hasher`, which goes on from them."""
        stride = self._stride
        digests = hasher.digests(packed[:stride])
        if not digests:
            return digests
        first_digest = digests[0]
        known = self._prompts.pop(first_digest, None)
        if known is None:
            self._prompts[first_digest] = packed[:stride], digests.copy()
            digests += hasher.digests(packed, stride)
        else:
            num_known = _num_common_blocks(packed, known[0], stride)
            hasher.skip(packed[stride : num_known * stride])
            digests = known[1][:num_known] + hasher.digests(packed, num_known * stride)
            self._prompts[first_digest] = packed, digests.copy()
        if len(self._prompts) > self._MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        return digests


def _num_common_blocks(one: bytes, other: bytes, stride: int) -> int:
    """Leading blocks of `stride` bytes that are equal in both; the first one is."""
    equal, above = 1, min(len(one), len(other)) // stride + 1
    # The whole comes first: prompts often differ in their last block only, or go on.
    middle = above - 1
    while equal < middle:
        if one[equal * stride : middle * stride] == other[equal * stride : middle * stride]:
            equal = middle
        else:
            above = middle
        middle = (equal + above) // 2
    return equal


class PrefixCache:
    """Digest to block and back. A digest may belong to several blocks; the earliest is found."""

    def __init__(self, num_blocks: int, transaction: Transaction) -> None:
        self.block_hash: list[bytes | None] = [None] * num_blocks
        """Digest of each block's content, None when it is not cached."""
        self._first: dict[bytes, int] = {}
        self._others: dict[bytes, list[int]] = {}
        self._transaction = transaction

    def find_longest_hit(self, block_hashes: Iterable[bytes], max_blocks: int) -> list[int]:
        """Blocks of the longest cached chain, at most `max_blocks` of them."""
        found = map(self._first.get, islice(block_hashes, max_blocks))
        # A loop in C that ends at the first None.
        return list(iter(found.__next__, None))

    def insert(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Cache uncached blocks under their digests, which are different from each other."""
        first, block_hash = self._first, self.block_hash
        self._transaction.record(self._undo_insert, blocks, digests)
        for block, digest in zip(blocks, digests, strict=True):
            block_hash[block] = digest
            if first.setdefault(digest, block) != block:
                self._others.setdefault(digest, []).append(block)

    def evict(self, blocks: Iterable[int]) -> None:
        """Forget cached blocks."""
        first, others = self._first, self._others
        evicted: list[tuple[int, bytes, int]] = []
        self._transaction.record(self._undo_evict, evicted)
        for block in blocks:
            digest = self.block_hash[block]
            if digest is None:
                raise ValueError(f"block={block} is not cached")
            rank = 0 if first[digest] == block else 1 + others[digest].index(block)
            evicted.append((block, digest, rank))
            self.block_hash[block] = None
            if digest not in others:
                del first[digest]
                continue
            if rank == 0:
                first[digest] = others[digest].pop(0)
            else:
                del others[digest][rank - 1]
            if not others[digest]:
                del others[digest]

    def clear(self) -> None:
        """Forget every block."""
        self._transaction.record(
            self._undo_clear, self.block_hash.copy(), self._first, self._others
        )
        self.block_hash[:] = [None] * len(self.block_hash)
        self._first, self._others = {}, {}

    def blocks_of(self, digest: bytes) -> list[int]:
        """Blocks that hold `digest`, the one that is found first."""
        if digest not in self._first:
            return []
        return [self._first[digest], *self._others.get(digest, ())]

    def digests(self) -> list[bytes]:
        """Prefixes that can be found."""
        return list(self._first)

    def _undo_insert(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        for block, digest in zip(blocks, digests, strict=True):
            self._set_blocks(digest, [other for other in self.blocks_of(digest) if other != block])
            self.block_hash[block] = None

    def _undo_evict(self, evicted: list[tuple[int, bytes, int]]) -> None:
        for block, digest, rank in reversed(evicted):
            blocks = [other for other in self.blocks_of(digest) if other != block]
            blocks.insert(rank, block)
            self._set_blocks(digest, blocks)
            self.block_hash[block] = digest

    def _undo_clear(
        self,
        block_hash: list[bytes | None],
        first: dict[bytes, int],
        others: dict[bytes, list[int]],
    ) -> None:
        self.block_hash[:] = block_hash
        self._first, self._others = first, others

    def _set_blocks(self, digest: bytes, blocks: list[int]) -> None:
        self._first.pop(digest, None)
        self._others.pop(digest, None)
        if blocks:
            self._first[digest] = blocks[0]
        if len(blocks) > 1:
            self._others[digest] = blocks[1:]
