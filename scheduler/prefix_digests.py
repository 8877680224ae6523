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


def root_digest(cache_salt: str | None) -> bytes:
    """What the first block's digest is chained to. Requests of different salts share nothing."""
    # As many bytes with a salt as without, or tokens could stand for a salt.
    return sha256(cache_salt.encode()).digest() if cache_salt else bytes(32)


def block_digests(parent: bytes, packed: bytes, block_size: int) -> list[bytes]:
    """Digests of the full blocks of packed tokens, each over all tokens up to the block's end.

    SHA-256, as in vLLM: equal digests stand for equal prefixes, and no prompt can be made up to hit
    the blocks of another, which Python's `hash` would allow.
    """
    stride = block_size * _TOKEN_BYTES
    digests = []
    for begin in range(0, len(packed) - stride + 1, stride):
        parent = sha256(parent + packed[begin : begin + stride]).digest()
        digests.append(parent)
    return digests
