"""What a scheduler must keep, told from the requests given to it and the steps that it returns.

Rules: a step has only live requests, each once, within the budgets; blocks exist, and no slot is
written that another live request reads; what is read was computed for the same tokens since the
last reset; admission is in order of arrival; every request ends with the tokens that were sampled.
For the Neuron kinds also: no mixed step, one prefill at a time, the smallest bucket, the bounds on
steps of one kind in a row.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...reference.paging import NULL_BLOCK_ID
from .. import SchedulerConfig, SchedulerOutput

Slot = tuple[int, int]
"""(block, offset)."""


class InvariantError(AssertionError):
    """A rule is broken; the message says which, and by whom."""


@dataclass
class Record:
    """A request as its user knows it."""

    name: str
    number: int
    """Order of arrival."""
    num_prompt_tokens: int
    tokens: list[int]
    """The prompt and what was sampled since."""
    max_tokens: int
    stops: frozenset[int]
    salt: str | None
    started: bool = False
    computed: int = 0
    table: list[int] = field(default_factory=list)

    @property
    def is_decode_ready(self) -> bool:
        """Whether the next token alone is left to compute."""
        return self.started and self.computed >= len(self.tokens) - 1 >= self.num_prompt_tokens


class Ledger:
    """Follows one scheduler; every method raises InvariantError where a rule is broken."""

    def __init__(self, config: SchedulerConfig, *, neuron: bool, policy: Mapping[str, Any]) -> None:
        self.config, self.neuron, self.policy = config, neuron, policy
        self.live: dict[str, Record] = {}
        self.arrivals = 0
        self.pause = 0
        self._content: dict[Slot, tuple[str | None, tuple[int, ...]]] = {}
        self._in_a_row: tuple[str, int] = ("", 0)

    def add(self, given: Mapping[str, Any], stops: frozenset[int]) -> None:
        """A request was taken."""
        prompt = list(given["prompt"])
        self.live[given["id"]] = Record(
            given["id"],
            self.arrivals,
            len(prompt),
            prompt,
            given["max_tokens"],
            stops,
            given.get("salt"),
        )
        self.arrivals += 1

    def gone(self, name: str) -> None:
        """A request ended or was aborted."""
        self.live.pop(name, None)

    def reset(self, done: object, running: bool) -> None:
        """The prefix cache was reset, or the scheduler refused to."""
        if not isinstance(done, bool):
            raise InvariantError(f"reset_prefix_cache returns {done!r}, must be True or False")
        busy = any(record.table for record in self.live.values())
        if not done and not busy:
            raise InvariantError("reset_prefix_cache refuses although nobody holds a block")
        if running:
            for record in self.live.values():
                record.table, record.computed = [], 0
        if done:
            self._content.clear()

    def step(self, output: SchedulerOutput) -> list[tuple[Record, bool]]:
        """A step was scheduled: its requests, and whether each samples a token."""
        for name in output.preempted_req_ids or ():
            if name in self.live:
                self.live[name].table, self.live[name].computed = [], 0
        counts = output.num_scheduled_tokens
        before = {name: (r.computed, r.is_decode_ready) for name, r in self.live.items()}
        self._check_budgets(counts, output)
        admitted = list(self._take_in(output))
        self._check_order(admitted)
        prefills = [name for name in counts if self._is_prefill(self.live[name])]
        if self.neuron:
            self._check_neuron(output, prefills)
            self._check_bounds(before, prefills, bool(counts))
        written: dict[Slot, str] = {}
        for name, count in counts.items():
            self._check_slots(self.live[name], count, written)
        sampled = []
        for name, count in counts.items():
            record = self.live[name]
            record.computed += count
            sampled.append((record, record.computed == len(record.tokens)))
        return sampled

    def _check_budgets(self, counts: Mapping[str, int], output: SchedulerOutput) -> None:
        unknown = [name for name in counts if name not in self.live]
        if unknown:
            raise InvariantError(f"a step of {unknown}, which are not there (any more)")
        named = [new.req_id for new in output.scheduled_new_reqs]
        named += output.scheduled_cached_reqs.req_ids
        if sorted(named) != sorted(counts):
            raise InvariantError(f"counts for {sorted(counts)}, data for {sorted(named)}")
        if any(count < 1 for count in counts.values()):
            raise InvariantError(f"a request with no token to compute: {dict(counts)}")
        total = sum(counts.values())
        if total != output.total_num_scheduled_tokens:
            raise InvariantError(f"total {output.total_num_scheduled_tokens} of {dict(counts)}")
        if total > self.config.step_token_budget or len(counts) > self.config.max_num_seqs:
            raise InvariantError(
                f"{total} tokens of {len(counts)} requests: at most "
                f"{self.config.step_token_budget} of {self.config.max_num_seqs} are allowed"
            )
        if counts and self.pause == 2:
            raise InvariantError(f"a step of {list(counts)} although everything is paused")

    def _take_in(self, output: SchedulerOutput) -> Iterator[Record]:
        """Block tables and computed tokens as the runner would know them; yields who is new."""
        for new in output.scheduled_new_reqs:
            record = self.live[new.req_id]
            if record.started:
                raise InvariantError(f"{record.name} is new for the second time")
            if list(new.prompt_token_ids) != record.tokens[: record.num_prompt_tokens]:
                raise InvariantError(f"{record.name} has another prompt than it was given")
            record.started = True
            record.table, record.computed = list(new.block_ids[0]), new.num_computed_tokens
            yield record
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            record = self.live[name]
            if name in cached.resumed_req_ids:
                record.table, record.computed = list(blocks[0]) if blocks else [], computed
            elif blocks:
                record.table += blocks[0]
            if computed != record.computed:
                raise InvariantError(f"{name}: {computed} tokens computed, {record.computed} are")

    def _check_order(self, admitted: list[Record]) -> None:
        if self.config.policy != "fcfs" or not admitted:
            return
        if self.pause:
            raise InvariantError(f"{admitted[0].name} is admitted although admission is paused")
        waiting = [record for record in self.live.values() if not record.started]
        last = max(record.number for record in admitted)
        earlier = [record.name for record in waiting if record.number < last]
        if earlier:
            raise InvariantError(f"{admitted[-1].name} is admitted before {earlier}")

    def _is_prefill(self, record: Record) -> bool:
        return record.computed < max(record.num_prompt_tokens, len(record.tokens) - 1)

    def _check_neuron(self, output: SchedulerOutput, prefills: list[str]) -> None:
        counts = output.num_scheduled_tokens
        if prefills and len(prefills) < len(counts):
            raise InvariantError(f"a mixed step: {list(counts)}, of which {prefills} are prefills")
        if len(prefills) > 1:
            raise InvariantError(f"more than one prefill in a step: {prefills}")
        for name, count in counts.items():
            fitting = [bucket for bucket in self.config.prefill_buckets if bucket >= count]
            right = min(fitting, default=None) if name in prefills else count
            found = (output.num_scheduled_tokens_padded or {}).get(name)
            if found != right:
                raise InvariantError(f"{name}: {count} tokens padded to {found}, must be {right}")

    def _check_bounds(
        self, before: Mapping[str, tuple[int, bool]], prefills: list[str], any_work: bool
    ) -> None:
        ready = any(is_ready for _, is_ready in before.values())
        kind = "prefills" if prefills else "decodes" if any_work else ""
        last, length = self._in_a_row
        # Prefills alone only count while somebody could decode instead.
        counts = kind == "decodes" or (kind == "prefills" and ready)
        self._in_a_row = (kind, (length if kind == last else 0) + 1) if counts else ("", 0)
        limit = self.policy.get("max_consecutive_prefills")
        if kind == "prefills" and limit is not None and self._in_a_row[1] > limit:
            raise InvariantError(
                f"{self._in_a_row[1]} prefill steps in a row while decodes wait, at most {limit}"
            )

    def _check_slots(self, record: Record, count: int, written: dict[Slot, str]) -> None:
        size, table = self.config.block_size, record.table
        end = record.computed + count
        if end > len(record.tokens):
            raise InvariantError(f"{record.name} computes {end} of {len(record.tokens)} tokens")
        if len(table) * size < end:
            raise InvariantError(f"{record.name} computes {end} tokens in {len(table)} blocks")
        bad = [b for b in table if not 0 <= b < self.config.num_blocks or b == NULL_BLOCK_ID]
        if bad or len(set(table)) < len(table):
            raise InvariantError(f"{record.name} has the block table {table}")
        for position in range(record.computed):
            slot = table[position // size], position % size
            if self._content.get(slot) != (record.salt, tuple(record.tokens[: position + 1])):
                raise InvariantError(
                    f"{record.name} reads token {position} in block {slot[0]}, where something "
                    "else was computed, or nothing since the last reset"
                )
        for position in range(record.computed, end):
            slot = table[position // size], position % size
            owners = [r.name for r in self.live.values() if self._is_foreign(record, r, slot[0])]
            if slot in written or owners:
                other = written.get(slot) or owners[0]
                raise InvariantError(f"{record.name} writes block {slot[0]} of {other}")
            written[slot] = record.name
            self._content[slot] = record.salt, tuple(record.tokens[: position + 1])

    def _is_foreign(self, record: Record, other: Record, block: int) -> bool:
        """Whether `other` has a block that `record` writes and does not wait for its content.

        Requests may share a whole block of equal tokens before it is computed, in one step even.
        """
        if other is record or block not in other.table:
            return False
        index = other.table.index(block)
        end = (index + 1) * self.config.block_size
        same = record.tokens[:end] == other.tokens[:end] and record.salt == other.salt
        whole = len(record.tokens) >= end and self.config.enable_prefix_caching
        return not (same and whole and record.table.index(block) == index)

    def expected_output(self, record: Record, sampled: int) -> tuple[list[int], str | None]:
        """Tokens and finish reason that an update must report for one sampled token."""
        record.tokens.append(sampled)
        if sampled in record.stops:
            return [sampled], "stop"
        generated = len(record.tokens) - record.num_prompt_tokens
        full = len(record.tokens) >= self.config.max_model_len or generated >= record.max_tokens
        return [sampled], "length" if full else None
