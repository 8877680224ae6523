"""KV blocks of the scheduling model: who owns them, which are cached, in which order they go.

The prefix cache is defined by content: a cached block holds a whole prefix (salt and all tokens up
to its end), and a request hits it exactly if its own text begins with that prefix. No hashes.
"""

import numpy as np

from .paging import num_blocks_for
from .scheduler_state import IntArray, Pool, Rules, State, Status, integers


def prefix_content(state: State, row: int, num_tokens: int) -> bytes:
    """What a block that ends at `num_tokens` of this request holds."""
    salt = int(state.requests["salt"][row])
    return np.concatenate([integers([salt]), state.tokens[row][:num_tokens]]).tobytes()


def find_block(pool: Pool, content: bytes) -> int | None:
    """Oldest cached block with this content."""
    same = [block for block, held in enumerate(pool.content) if held == content]
    return min(same, key=lambda block: int(pool.stamp[block])) if same else None


def longest_hit(rules: Rules, state: State, row: int) -> IntArray:
    """Cached blocks [num_hits] that a waiting request may share.

    The last known token is always computed again, so a hit ends before it.
    """
    hits: list[int] = []
    if rules.enable_prefix_caching and not state.requests["skip_read"][row]:
        for index in range((state.num_tokens(row) - 1) // rules.block_size):
            content = prefix_content(state, row, (index + 1) * rules.block_size)
            block = find_block(state.pool, content)
            if block is None:
                break
            hits.append(block)
    return integers(hits)


def watermark_blocks(rules: Rules, state: State, row: int) -> int:
    """Blocks that an admission must leave free while another request is running."""
    others = len(state.running) + state.hidden[0]
    if int(state.requests["status"][row]) == Status.RUNNING or not others:
        return 0
    return int(rules.watermark * rules.num_blocks)


def fits(rules: Rules, state: State, row: int, hits: IntArray, num_tokens: int) -> bool:
    """Whether the free blocks let the request own enough for `num_tokens` tokens.

    A hit that nobody owns lies among the free blocks, so taking it costs one.
    """
    owned = len(state.blocks[row]) + len(hits)
    new = max(num_blocks_for(num_tokens, rules.block_size) - owned, 0)
    revived = int(np.sum(state.pool.refs[hits] == 0))
    spare = watermark_blocks(rules, state, row)
    return new + revived + spare <= len(state.pool.free)


def allocate(
    rules: Rules, state: State, row: int, num_new: int, hits: IntArray, must_fit: bool
) -> IntArray | None:
    """Give a request the blocks for `num_new` more tokens; the new block ids, or None if refused.

    must_fit: the whole known text has to fit, not just this chunk. A refusal changes nothing.
    """
    computed = int(state.requests["computed"][row]) + len(hits) * rules.block_size
    whole = min(state.num_tokens(row), rules.max_model_len)
    slots = min(computed + num_new + rules.num_lookahead_tokens, rules.max_model_len)
    if must_fit and not fits(rules, state, row, hits, whole):
        return None
    if not fits(rules, state, row, hits, slots):
        return None
    pool = state.pool
    if len(hits):
        pool.refs[hits] += 1
        pool.free = pool.free[~np.isin(pool.free, hits)]
        state.blocks[row] = np.concatenate([state.blocks[row], hits])
        state.requests["hashed"][row] = len(hits)
    count = max(num_blocks_for(slots, rules.block_size) - len(state.blocks[row]), 0)
    new, pool.free = pool.free[:count], pool.free[count:]
    for block in new:
        pool.content[block] = b""
    pool.refs[new] = 1
    state.blocks[row] = np.concatenate([state.blocks[row], new])
    cache_blocks(rules, state, row, min(computed + num_new, state.num_tokens(row)))
    return new


def cache_blocks(rules: Rules, state: State, row: int, num_tokens: int) -> None:
    """Enter the full blocks of the request's first `num_tokens` tokens into the prefix cache."""
    if not rules.enable_prefix_caching:
        return
    pool = state.pool
    first = int(state.requests["hashed"][row])
    for index in range(first, num_tokens // rules.block_size):
        block = state.blocks[row][index]
        pool.content[block] = prefix_content(state, row, (index + 1) * rules.block_size)
        pool.stamp[block] = pool.stamp.max() + 1
        state.requests["hashed"][row] = index + 1


def release(state: State, row: int) -> None:
    """Take all blocks from a request, last one first.

    A block that nobody owns any more goes to the back of the free list if it is cached, else to
    the front.
    """
    pool = state.pool
    blocks = state.blocks[row][::-1]
    pool.refs[blocks] -= 1
    freed = blocks[pool.refs[blocks] == 0]
    cached = np.array([pool.content[block] != b"" for block in freed], dtype=bool)
    pool.free = np.concatenate([freed[~cached], pool.free, freed[cached]])
    state.blocks[row] = integers()
    state.requests["hashed"][row] = 0


def forget_prefixes(rules: Rules, state: State) -> bool:
    """Empty the prefix cache if no request owns a block; whether it did."""
    if np.any(state.pool.refs > 0):
        return False
    state.pool.content = [b""] * rules.num_blocks
    return True
