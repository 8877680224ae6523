"""Digests by which equal prefixes of requests are told."""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from operator import index
from sys import byteorder
from typing import SupportsIndex

_TOKEN_BYTES = 4
MAX_TOKEN_ID: int = 2 ** (8 * _TOKEN_BYTES - 1) - 1
"""Largest token id; tensors of token ids are int32."""
_SIGN_BYTES = slice(_TOKEN_BYTES - 1 if byteorder == "little" else 0, None, _TOKEN_BYTES)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as consecutive int32. ValueError for anything else than 0..`MAX_TOKEN_ID`."""
    try:
        # Of all ways that the standard library offers, the one that reads a list fastest.
        data = array("I", token_ids).tobytes()
        # A byte is ASCII when its highest bit is clear: the sign of every token at C speed.
        if data[_SIGN_BYTES].isascii():
            return data
    except (OverflowError, TypeError):
        pass  # the token at fault is named below
    fault = next(token for token in token_ids if not _is_token_id(token))
    raise ValueError(f"token id {fault!r}: must be an integer within 0..{MAX_TOKEN_ID}")


def _is_token_id(token: SupportsIndex) -> bool:
    try:
        return 0 <= index(token) <= MAX_TOKEN_ID
    except TypeError:
        return False


class PrefixDigests:
    """Digests of one request's full blocks, each over all tokens up to the block's end.

    SHA-256, as in vLLM: equal digests stand for equal prefixes, and no prompt can be made up to hit
    the blocks of another, which Python's `hash` would allow. Requests of different salts share
    nothing. The first block is hashed at once, since its digest tells whether anybody else begins
    alike; the others are only packed until somebody does.
    """

    __slots__ = ("_root", "_stride", "digests", "packed", "unhashed")

    def __init__(self, block_size: int, cache_salt: str | None, packed_prompt: bytes) -> None:
        self._stride = stride = block_size * _TOKEN_BYTES
        # As many bytes with a salt as without, or tokens could stand for a salt.
        self._root = sha256(cache_salt.encode()).digest() if cache_salt else bytes(32)
        self.packed: bytes | bytearray | None = packed_prompt
        """Tokens of the full blocks, maybe of a part of the next; None once all are hashed."""
        self.digests: list[bytes] = []
        """Of all full blocks, or only of the first one."""
        self.unhashed: list[int] = []
        """Cached blocks without a digest, from the second block on; PrefixCache writes it."""
        if len(packed_prompt) >= stride:
            self.digests.append(_digest(self._root, packed_prompt[:stride]))

    @property
    def num_blocks(self) -> int:
        """Full blocks."""
        return len(self.digests) if self.packed is None else len(self.packed) // self._stride

    def append(self, packed_block: bytes) -> None:
        """Go on by a full block of packed tokens."""
        if isinstance(self.packed, bytes):
            self.packed = bytearray(self.packed[: self.num_blocks * self._stride])
        if self.packed is not None:
            self.packed += packed_block
        if self.packed is None or not self.digests:
            parent = self.digests[-1] if self.digests else self._root
            self.digests.append(_digest(parent, packed_block))

    def truncate(self, num_blocks: int) -> None:
        """Drop all but the first `num_blocks` blocks."""
        del self.digests[num_blocks:]
        if self.packed is not None:
            self.packed = self.packed[: num_blocks * self._stride]

    def all_digests(self, known: tuple[bytes, list[bytes]] | None = None) -> list[bytes]:
        """Digests of all full blocks.

        `known` are the packed tokens and all digests of a prefix that begins with the same block.
        """
        packed, stride = self.packed, self._stride
        if packed is None:
            return self.digests
        num_known = 1
        digests = self.digests
        if known is not None:
            num_known = _num_common_blocks(packed, known[0], stride)
            digests = known[1]
        digests = digests[:num_known]
        for begin in range(num_known * stride, len(packed) - stride + 1, stride):
            digests.append(_digest(digests[-1], packed[begin : begin + stride]))
        return digests

    def set_digests(self, digests: list[bytes], packed: bytes | bytearray | None = None) -> None:
        """Take the digests of all full blocks, or with `packed` the state before that."""
        self.digests, self.packed = digests, packed


def _digest(parent: bytes, packed_block: bytes | bytearray) -> bytes:
    return sha256(parent + packed_block).digest()


class RecentPrompts:
    """The latest prefixes of different first blocks that were hashed, with their digests.

    One that begins like one of them takes the digests of the blocks they share, so only the rest of
    it is hashed. Each entry holds 4 bytes per token and 8 per block, and keeps the digests alive.
    """

    _MAX_PROMPTS = 16

    def __init__(self) -> None:
        # By the digest of the first block, which tells salts apart; the oldest comes first.
        self._prompts: dict[bytes, tuple[bytes, list[bytes]]] = {}

    def all_digests(self, prefix: PrefixDigests) -> list[bytes]:
        """Digests of all full blocks of `prefix`, of which there is at least one."""
        if prefix.packed is None:
            return prefix.digests
        first_digest = prefix.digests[0]
        digests = prefix.all_digests(self._prompts.pop(first_digest, None))
        self._prompts[first_digest] = bytes(prefix.packed), digests.copy()
        if len(self._prompts) > self._MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        return digests


def _num_common_blocks(one: bytes | bytearray, other: bytes, stride: int) -> int:
    """Leading blocks of `stride` bytes that are equal in both; the first one is."""
    view = memoryview(other)
    equal, limit = 1, min(len(one), len(other)) // stride
    # Prompts often go on or differ in their last block only.
    for middle in (limit, limit - 1):
        if equal < middle and one.startswith(view[stride : middle * stride], stride):
            return middle
    above = limit - 1
    while above - equal > 1:
        middle = (equal + above) // 2
        if one.startswith(view[equal * stride : middle * stride], equal * stride):
            equal = middle
        else:
            above = middle
    return equal
