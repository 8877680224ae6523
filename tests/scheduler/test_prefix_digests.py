"""Digests of prefixes: what they are."""

import struct
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.scheduler.prefix_digests import MAX_TOKEN_ID, block_digests, pack_tokens, root_digest


def chained(block_size: int, tokens: list[int], salt: str | None = None) -> list[bytes]:
    """Digests of full blocks by their definition."""
    digest = sha256(salt.encode()).digest() if salt else bytes(32)
    digests = []
    for end in range(block_size, len(tokens) + 1, block_size):
        block = struct.pack(f"={block_size}I", *tokens[end - block_size : end])
        digest = sha256(digest + block).digest()
        digests.append(digest)
    return digests


@given(
    block_size=st.integers(1, 4),
    tokens=st.lists(st.integers(0, MAX_TOKEN_ID), max_size=12),
    num_known=st.integers(0, 3),
    salt=st.sampled_from([None, "salt"]),
)
def test_digests_are_chained_over_full_blocks(
    block_size: int, tokens: list[int], num_known: int, salt: str | None
) -> None:
    expected = chained(block_size, tokens, salt)
    digests = block_digests(root_digest(salt), pack_tokens(tokens), block_size)
    assert digests == expected
    # Going on from any block gives the same as beginning anew.
    num_known = min(num_known, len(digests))
    parent = digests[num_known - 1] if num_known else root_digest(salt)
    rest = pack_tokens(tokens[num_known * block_size :])
    assert digests[:num_known] + block_digests(parent, rest, block_size) == expected


@pytest.mark.parametrize("token", [-1, MAX_TOKEN_ID + 1, 2**40, 1.5, "7", None])
def test_what_is_no_token_is_named(token: object) -> None:
    with pytest.raises(ValueError, match="must be an integer within"):
        pack_tokens([1, token])  # type: ignore[list-item]  # the wrong kinds are the test
