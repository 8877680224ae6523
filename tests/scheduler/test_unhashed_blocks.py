"""What the prefix cache finds does not depend on when digests are computed."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import given
from hypothesis import strategies as st

from segattn.scheduler.prefix_cache import PrefixCache
from segattn.scheduler.prefix_digests import PrefixDigests, pack_tokens
from segattn.scheduler.transaction import Transaction
from segattn.tests.scheduler.state import state_of

T = TypeVar("T")
NUM_BLOCKS = 40


class TakenBackError(Exception):
    """Ends a transaction that is to be taken back."""


@dataclass
class Owner:
    """A request with blocks of one token each; those that it owns are cached."""

    tokens: list[int]
    prefix: PrefixDigests
    blocks: list[int] = field(default_factory=list)


class CacheAndModel:
    """The cache under test beside a list of all cached blocks, each with its whole prefix."""

    def __init__(self) -> None:
        self.transaction = Transaction()
        self.cache = PrefixCache(NUM_BLOCKS, self.transaction)
        self.owners: list[Owner] = []
        self.cached: list[tuple[tuple[int, ...], int]] = []
        # As in the free list: those of one request in a row, its last block first.
        self.free: list[int] = []
        self.uncached = list(range(NUM_BLOCKS - 1, 0, -1))

    def twice(self, change: Callable[[], T]) -> T:
        """Make a change, take it back, and make it again."""
        before = state_of((self.cache, self.owners))
        with suppress(TakenBackError), self.transaction:
            change()
            raise TakenBackError
        assert state_of((self.cache, self.owners)) == before
        with self.transaction:
            return change()

    def add(self, tokens: list[int]) -> None:
        owner = Owner(tokens, PrefixDigests(1, None, pack_tokens(tokens)))
        self.cache.prepare(owner.prefix)
        self.owners.append(owner)

    def find(self, owner: Owner, max_blocks: int) -> None:
        """Start with what is found for a request without blocks."""
        if owner.blocks:
            return
        expected = []
        for end in range(1, min(max_blocks, len(owner.tokens)) + 1):
            wanted = tuple(owner.tokens[:end])
            blocks = [block for prefix, block in self.cached if prefix == wanted]
            if not blocks:
                break
            expected.append(blocks[0])
        max_blocks = min(max_blocks, len(owner.tokens))
        found = self.twice(lambda: self.cache.find_longest_hit(owner.prefix, max_blocks))
        assert found == expected
        owner.blocks = found
        self.free = [block for block in self.free if block not in found]

    def insert(self, owner: Owner, count: int) -> None:
        begin = len(owner.blocks)
        count = min(count, len(owner.tokens) - begin, len(self.uncached))
        if count:
            blocks = [self.uncached.pop() for _ in range(count)]
            self.twice(lambda: self.cache.insert(blocks, owner.prefix, begin))
            owner.blocks = owner.blocks + blocks
            for end, block in enumerate(blocks, start=begin + 1):
                self.cached.append((tuple(owner.tokens[:end]), block))

    def append(self, owner: Owner, token: int) -> None:
        def append() -> None:
            prefix = owner.prefix
            self.transaction.record((prefix.truncate, prefix.num_blocks))
            prefix.append(pack_tokens([token]))

        self.twice(append)
        owner.tokens.append(token)

    def release(self, owner: Owner) -> None:
        """Take its blocks away, as a preemption does."""
        blocks, owner.blocks = owner.blocks, []
        owned = {block for other in self.owners for block in other.blocks}
        self.free += [block for block in reversed(blocks) if block not in owned]

    def evict(self, count: int) -> None:
        blocks, self.free = self.free[:count], self.free[count:]
        self.twice(lambda: self.cache.evict(blocks))
        self.cached = [(prefix, block) for prefix, block in self.cached if block not in blocks]
        self.uncached += blocks

    def clear(self) -> None:
        for owner in self.owners:
            self.release(owner)
        self.twice(self.cache.clear)
        self.uncached += [block for _, block in self.cached]
        self.cached, self.free = [], []

    def check(self) -> None:
        """Every cached block is found under the digest of its prefix, the earliest first."""
        expected: dict[bytes, list[int]] = {}
        for tokens, block in self.cached:
            digest = PrefixDigests(1, None, pack_tokens(tokens)).all_digests()[-1]
            expected.setdefault(digest, []).append(block)
        assert self.cache.blocks_by_digest() == expected


TOKENS = st.integers(3, 4)


@given(data=st.data())
def test_blocks_are_found_as_if_all_were_hashed_at_once(data: st.DataObject) -> None:
    both = CacheAndModel()
    for _ in range(data.draw(st.integers(5, 25))):
        action = data.draw(st.sampled_from(["add", "find", "insert", "insert", "more", "more"]))
        if action == "add" or not both.owners:
            both.add(data.draw(st.lists(TOKENS, max_size=5)))
            continue
        owner = data.draw(st.sampled_from(both.owners))
        if action == "find":
            both.find(owner, data.draw(st.integers(0, 6)))
        elif action == "insert":
            both.insert(owner, data.draw(st.integers(1, 3)))
        else:
            match data.draw(st.integers(0, 9)):
                case 0:
                    both.clear()
                case 1 | 2:
                    both.append(owner, data.draw(TOKENS))
                case 3 | 4 | 5:
                    both.release(owner)
                case _:
                    both.evict(data.draw(st.integers(1, 3)))
        both.check()
