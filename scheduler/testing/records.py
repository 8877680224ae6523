"""What the user and the runner know of requests and of the rows of the KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EOS = 2
"""End-of-sequence token of a request that names none."""

Slot = tuple[int, int]
"""(block, offset)."""


class InvariantError(AssertionError):
    """A rule is broken; the message says which, and by whom."""


@dataclass(eq=False)
class Record:
    """A request as its user knows it. Counts are tokens."""

    name: str
    order: tuple[float, ...]
    """Of admission: when it was given, or its priority and its arrival time."""
    num_prompt_tokens: int
    tokens: list[int]
    """The prompt and what was sampled since."""
    max_tokens: int
    stops: frozenset[int]
    salt: str | None
    skips_cache: bool
    started: bool = False
    computed: int = 0
    settled: int = 0
    """Computed, without the tokens that were not known when their step was scheduled."""
    rejected: int = 0
    """Drafts, ever."""
    placeholders: int = 0
    """Tokens that steps in flight will give it, all drafts taken as accepted."""
    table: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    """Proposed for the next step."""
    epoch: int = 0
    """How often it lost its blocks."""
    reset_at: int = -1
    """Epoch of the latest reset: what was in flight before is dropped."""

    @classmethod
    def of(cls, given: Mapping[str, Any], number: int, policy: str) -> "Record":
        """A request that was just given, after `number` others."""
        prompt = list(given["prompt"])
        place = (given.get("priority", 0), given.get("arrival", 0.0))
        end = given.get("eos", EOS)
        return cls(
            given["id"],
            (number,) if policy == "fcfs" else place,
            len(prompt),
            prompt,
            given["max_tokens"],
            frozenset([*given.get("stop", ()), *([] if end is None else [end])]),
            given.get("salt"),
            given.get("skip_read", False),
        )

    @property
    def is_prefill(self) -> bool:
        """Whether more than the newest token is left to compute."""
        return self.computed < max(self.num_prompt_tokens, len(self.tokens) - 1)

    def can_decode(self, max_model_len: int) -> bool:
        """Whether a decode step could compute a token of it."""
        is_ending = (
            self.placeholders > 0
            and self.computed + 2 - self.placeholders >= self.num_prompt_tokens + self.max_tokens
        )
        known = min(len(self.tokens) + self.placeholders, max_model_len - 1)
        return bool(self.table) and not self.is_prefill and known > self.computed and not is_ending

    def lose_blocks(self) -> None:
        """It was preempted."""
        self.table, self.drafts = [], []
        self.computed = self.settled = self.placeholders = 0
        self.epoch += 1

    def take_in(self, sampled: list[int], max_model_len: int) -> tuple[list[int], str | None]:
        """Append sampled tokens up to the one that ends it; these, and the finish reason."""
        for count, token in enumerate(sampled, 1):
            self.tokens.append(token)
            if token in self.stops:
                return sampled[:count], "stop"
            generated = len(self.tokens) - self.num_prompt_tokens
            if len(self.tokens) >= max_model_len or generated >= self.max_tokens:
                return sampled[:count], "length"
        return sampled, None


@dataclass(frozen=True)
class Work:
    """What a step computes of a request: `count` tokens from `start`, the last ones drafts."""

    record: Record
    start: int
    count: int
    drafts: int
    samples: bool
    epoch: int
    rejected: int
    """Drafts of the request, ever, when the step was scheduled."""

    @property
    def is_stale(self) -> bool:
        """Whether the request lost its blocks since."""
        return self.record.epoch != self.epoch


class KVContent:
    """Which token of which request each row of the KV cache was computed for."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._rows: dict[Slot, tuple[Record, int]] = {}

    def clear(self) -> None:
        """Nothing that was computed may be read any more."""
        self._rows.clear()

    def slot(self, record: Record, position: int) -> Slot:
        """Where the row of a token lies."""
        return record.table[position // self.block_size], position % self.block_size

    def check_read(self, record: Record) -> None:
        """All settled rows were computed for the same tokens and the same salt."""
        for position in range(min(record.computed, record.settled)):
            slot = self.slot(record, position)
            if not self._holds(slot, record, position):
                raise InvariantError(
                    f"{record.name} reads token {position} in block {slot[0]}, where something "
                    "else was computed, or nothing since the last reset"
                )

    def _holds(self, slot: Slot, record: Record, position: int) -> bool:
        writer, written = self._rows.get(slot, (None, -1))
        if writer is None or written != position:
            return False
        known = position + 1
        return writer is record or (
            writer.salt == record.salt
            and known <= min(len(writer.tokens), len(record.tokens))
            and writer.tokens[:known] == record.tokens[:known]
        )

    def write(self, record: Record, first: int, end: int) -> None:
        """The rows of these positions were computed for the request's tokens."""
        for position in range(first, end):
            self._rows[self.slot(record, position)] = record, position

    def overwrite(self, record: Record, first: int, end: int) -> None:
        """The rows of these positions get what is not known yet."""
        for position in range(first, end):
            self._rows.pop(self.slot(record, position), None)
