"""Digests of a prompt are the same whatever prompts came before it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.scheduler.prefix_cache import (
    PrefixHasher,
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


@given(
    block_size=st.integers(1, 4),
    given=st.lists(st.tuples(prompts(), st.sampled_from([None, "salt"])), min_size=1, max_size=8),
)
def test_digests_do_not_depend_on_earlier_prompts(
    block_size: int, given: list[tuple[list[int], str | None]]
) -> None:
    recent = RecentPrompts(block_size)
    for prompt, salt in given:
        packed = pack_tokens(prompt)
        alone, hasher = PrefixHasher(block_size, salt), PrefixHasher(block_size, salt)
        expected = alone.digests(packed)
        assert recent.digests(hasher, packed) == expected
        # Both go on in the same way.
        assert hasher.digests(bytes(64)) == alone.digests(bytes(64))


def test_digests_of_one_prompt_are_no_part_of_another() -> None:
    recent = RecentPrompts(block_size=2)
    packed = pack_tokens(STEM)
    seen = [recent.digests(PrefixHasher(2, None), packed) for _ in range(3)]
    expected = list(seen[0])
    for digests in seen:
        digests.append(b"the block that the first output fills")
    assert recent.digests(PrefixHasher(2, None), packed) == expected


def test_what_is_kept_of_earlier_prompts_is_bounded() -> None:
    recent = RecentPrompts(block_size=2)
    for number in range(100):
        recent.digests(PrefixHasher(2, None), pack_tokens([number, *STEM]))
    kept = list(recent._prompts.values())
    # One block of two int32 each: none of the prompts came twice.
    assert [len(packed) for packed, _ in kept] == [8] * 16
    for number in range(98, 100):
        recent.digests(PrefixHasher(2, None), pack_tokens([number, *STEM]))
    kept = list(recent._prompts.values())
    assert [len(packed) for packed, _ in kept] == [8] * 14 + [44] * 2


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
    hashed: list[int] = []
    digests = PrefixHasher.digests

    def count(self: PrefixHasher, packed: bytes, begin: int = 0) -> list[bytes]:
        found = digests(self, packed, begin)
        hashed.append(len(found))
        return found

    monkeypatch.setattr(PrefixHasher, "digests", count)
    recent = RecentPrompts(block_size=4)
    num_hashed = []
    for last in (7, 7, 7, 8):
        hashed.clear()
        recent.digests(PrefixHasher(4, None), pack_tokens([*range(39), last]))
        num_hashed.append(sum(hashed))
    # Its first block tells that it is known; of a new prompt only that is kept.
    assert num_hashed == [10, 10, 1, 2]
