"""What a paged KV cache holds if the steps of a scheduler are executed, for its tests.

A slot holds the K and V of one token at one position, which depend on all tokens before it. So the
content of a slot is the digest of a prefix, and a request reads rightly when every position that it
has computed holds the digest of its own prefix. Like a runner, the model knows of a request what
the outputs told, and nothing else of the scheduler.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

_UNKNOWN = -1
"""Content of a slot that was written for a token that nobody knows, as a missing draft."""


class _State:
    def __init__(self, tokens: list[int], num_prompt_tokens: int, block_ids: list[int]) -> None:
        self.tokens = tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.block_ids = block_ids
        self.num_computed = 0


class KVContent:
    """The slots of a cache with `block_size` tokens in a block. Steps come in scheduling order.

    Drafts need steps one at a time: while some are in flight, a runner corrects the positions.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], int] = {}
        self._states: dict[str, _State] = {}

    def execute(self, output: Any, sampled: Mapping[str, Sequence[int]]) -> Iterator[str]:
        """Execute a SchedulerOutput in which requests sample the tokens of `sampled`.

        Yields a sentence for each request that reads what was never computed for its tokens, or
        that has no block for a position. All requests of a step read after all have written, as
        layer by layer in one batch. A draft that was accepted is the token that was sampled.
        """
        self._learn(output)
        complaints = [
            self._write(output, name, sampled.get(name, ())) for name in output.num_scheduled_tokens
        ]
        complaints += [self._read(name) for name in output.num_scheduled_tokens]
        for name, tokens in sampled.items():
            if tokens:
                state = self._states[name]
                known = output.num_scheduled_tokens[name] - len(_drafts(output, name))
                state.tokens[state.num_computed + known :] = tokens
        yield from filter(None, complaints)

    def _learn(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self._states.pop(name, None)
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids)
            state = self._states[new.req_id] = _State(prompt, len(prompt), list(new.block_ids[0]))
            state.num_computed = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, num_computed, num_outputs in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            state = self._states[name]
            if name in cached.all_token_ids:
                state.tokens = list(cached.all_token_ids[name])
            del state.tokens[state.num_prompt_tokens + num_outputs :]
            if name in cached.resumed_req_ids:
                state.block_ids = []
            if blocks is not None:
                state.block_ids = state.block_ids + list(blocks[0])
            state.num_computed = num_computed

    def _write(self, output: Any, name: str, sampled: Sequence[int]) -> str:
        state, drafts = self._states[name], _drafts(output, name)
        drafts = [*sampled[:-1], *drafts[max(len(sampled) - 1, 0) :]]
        end = state.num_computed + output.num_scheduled_tokens[name]
        tokens = state.tokens[: end - len(drafts)] + drafts
        if len(tokens) < end:
            return f"{name}: {end} tokens are scheduled, {len(tokens)} are known"
        if end > len(state.block_ids) * self._block_size:
            return f"{name}: computes {end} tokens in {len(state.block_ids)} blocks"
        contents = prefix_contents(tokens)
        for position in range(state.num_computed, end):
            self._slots[self._slot(state, position)] = contents[position]
        return ""

    def _read(self, name: str) -> str:
        state = self._states[name]
        for position, content in enumerate(prefix_contents(state.tokens[: state.num_computed])):
            if self._slots.get(self._slot(state, position)) != content:
                block = state.block_ids[position // self._block_size]
                return f"{name}: position {position} in block {block} was not computed for it"
        return ""

    def _slot(self, state: _State, position: int) -> tuple[int, int]:
        return state.block_ids[position // self._block_size], position % self._block_size


def prefix_contents(tokens: Sequence[int]) -> list[int]:
    """Content of each position of a request with these tokens."""

    def extend(before: int, token: int) -> int:
        return _UNKNOWN if token < 0 or before == _UNKNOWN else abs(hash((before, token)))

    return list(accumulate(tokens, extend, initial=0))[1:]


def _drafts(output: Any, name: str) -> Sequence[int]:
    drafts: Sequence[int] = output.scheduled_spec_decode_tokens.get(name, ())
    return drafts
