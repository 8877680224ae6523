"""The whole state of a scheduler as plain values, for comparison before and after a call."""

from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

from segattn.scheduler.block_pool import BlockPool
from segattn.scheduler.prefix_cache import PrefixCache
from segattn.scheduler.prefix_digests import PrefixDigests
from segattn.scheduler.transaction import Transaction

MEMORIES = {"_common_prefix"}
"""Remembered results, which may be forgotten at any time."""


def state_of(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Nested tuples of all that `value` holds; an object met again stands as its number."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, (str, bytes, int, float, Enum)):
        return value
    if isinstance(value, Transaction):
        return (list(value), value._savepoints)
    if isinstance(value, BlockPool):
        # Links of blocks that are not free mean nothing.
        return ("BlockPool", tuple(value.free_list()), tuple(value.ref_counts))
    if isinstance(value, PrefixDigests):
        packed = value.packed and bytes(value.packed[: value.num_blocks * value._stride])
        return ("PrefixDigests", tuple(value.digests), packed, tuple(value.unhashed))
    if isinstance(value, PrefixCache):
        # The order of the digests means nothing.
        found = frozenset((digest, *blocks) for digest, blocks in value.blocks_by_digest().items())
        unhashed = frozenset(state_of(prefix) for prefix in value.unhashed_prefixes().values())
        return ("PrefixCache", tuple(value.block_hash), found, unhashed)
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, Mapping):
        return tuple((state_of(k, seen), state_of(v, seen)) for k, v in value.items())
    if isinstance(value, (list, tuple, deque)):
        return tuple(state_of(item, seen) for item in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(state_of(item, seen) for item in value)
    names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
    if not names:
        return value
    return tuple(
        (name, state_of(getattr(value, name), seen)) for name in sorted({*names} - MEMORIES)
    )


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """Where two states differ, as paths with both values."""
    if type(before) is tuple and type(after) is tuple and len(before) == len(after):
        return [
            line
            for place, (old, new) in enumerate(zip(before, after, strict=True))
            for line in differences(old, new, f"{path}.{_name(old, place)}")
        ]
    return [] if before == after else [f"{path}: {before!r} != {after!r}"]


def _name(value: Any, place: int) -> object:
    is_named = type(value) is tuple and len(value) == 2 and isinstance(value[0], str)
    return value[0] if is_named else place
