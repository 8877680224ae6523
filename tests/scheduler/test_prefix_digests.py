"""Digests of prefixes: what they are, when they are computed, and from what."""

import struct
from hashlib import sha256
from sys import byteorder

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.scheduler import prefix_digests
from segattn.scheduler.prefix_digests import (
    MAX_TOKEN_ID,
    PrefixDigests,
    RecentPrompts,
    _num_common_blocks,
    pack_tokens,
)

STEM = [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that begin alike, for a few tokens or entirely."""
    stem = STEM[: draw(st.integers(0, len(STEM)))]
    return stem + draw(st.lists(st.integers(3, 5), min_size=1, max_size=6))


def prefix(block_size: int, tokens: list[int], salt: str | None = None) -> PrefixDigests:
    return PrefixDigests(block_size, salt, pack_tokens(tokens))


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
    given=st.lists(st.tuples(prompts(), st.sampled_from([None, "salt"])), min_size=1, max_size=8),
)
def test_digests_do_not_depend_on_earlier_prompts(
    block_size: int, given: list[tuple[list[int], str | None]]
) -> None:
    recent = RecentPrompts()
    for prompt, salt in given:
        one = prefix(block_size, prompt, salt)
        expected = chained(block_size, prompt, salt)
        assert one.all_digests() == expected
        assert one.digests == expected[:1]
        if expected:
            one.set_digests(recent.all_digests(one))
            assert one.digests == recent.all_digests(one) == expected


@given(
    block_size=st.integers(1, 3),
    tokens=st.lists(st.integers(3, 5), max_size=20),
    num_prompt=st.integers(0, 20),
    hashed_at=st.integers(0, 20),
    kept=st.integers(0, 20),
)
def test_a_prefix_grows_and_is_cut_to_the_same_digests(
    block_size: int, tokens: list[int], num_prompt: int, hashed_at: int, kept: int
) -> None:
    one = prefix(block_size, tokens[:num_prompt])
    expected = chained(block_size, tokens)
    sizes = [one.num_blocks]
    for end in range((one.num_blocks + 1) * block_size, len(tokens) + 1, block_size):
        if one.num_blocks == hashed_at and one.digests:
            one.set_digests(one.all_digests())
        one.append(pack_tokens(tokens[end - block_size : end]))
        sizes.append(one.num_blocks)
    assert sizes == list(range(sizes[0], len(expected) + 1))
    assert one.all_digests() == expected
    one.truncate(kept)
    assert one.all_digests() == expected[:kept]
    assert one.num_blocks == len(expected[:kept])


def test_digests_of_one_prompt_are_no_part_of_another() -> None:
    recent = RecentPrompts()
    seen = [recent.all_digests(prefix(2, STEM)) for _ in range(3)]
    expected = list(seen[0])
    for digests in seen:
        digests.append(b"the block that the first output fills")
    assert recent.all_digests(prefix(2, STEM)) == expected


def test_what_is_kept_of_earlier_prompts_is_bounded() -> None:
    recent = RecentPrompts()
    for number in range(100):
        recent.all_digests(prefix(2, [number, *STEM]))
    assert [list(packed[::4]) for packed, _ in recent._prompts.values()] == [
        [number, *STEM] for number in range(84, 100)
    ]
    # One that comes again is the latest.
    recent.all_digests(prefix(2, [90, *STEM, 1]))
    assert [packed[0] for packed, _ in recent._prompts.values()][-2:] == [99, 90]
    assert len(recent._prompts) == 16


BLOCKS = st.lists(st.sampled_from([b"aaaa", b"aaab"]), min_size=0, max_size=9)


@given(one=BLOCKS, other=BLOCKS, rest=st.sampled_from([b"", b"aaa"]))
def test_all_blocks_that_two_prompts_share_are_found(
    one: list[bytes], other: list[bytes], rest: bytes
) -> None:
    num_common = 0
    for ours, theirs in zip(one, other, strict=False):
        if ours != theirs:
            break
        num_common += 1
    first = b"bbbb"
    found = _num_common_blocks(b"".join([first, *one]) + rest, b"".join([first, *other]), 4)
    assert found == 1 + num_common


def test_a_prompt_that_is_known_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = 0
    digest = prefix_digests._digest

    def count(parent: bytes, block: bytes | bytearray) -> bytes:
        nonlocal num_hashed
        num_hashed += 1
        return digest(parent, block)

    monkeypatch.setattr(prefix_digests, "_digest", count)
    recent = RecentPrompts()
    counts = []
    for last in (7, 7, 8):
        num_hashed = 0
        one = prefix(4, [*range(39), last])
        counts.append(num_hashed)
        recent.all_digests(one)
        counts.append(num_hashed)
    # The first block alone until somebody asks, then what no earlier prompt had.
    assert counts == [1, 10, 1, 1, 1, 2]


@pytest.mark.parametrize("fault", [-1, MAX_TOKEN_ID + 1])
def test_the_token_at_fault_is_named_not_the_ends_of_the_range(fault: int) -> None:
    assert pack_tokens([0, MAX_TOKEN_ID]) == b"\0\0\0\0" + MAX_TOKEN_ID.to_bytes(4, byteorder)
    with pytest.raises(ValueError, match=f"token id {fault}: must be an integer within"):
        pack_tokens([0, MAX_TOKEN_ID, fault])
