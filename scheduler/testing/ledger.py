"""What a scheduler must keep, told from the requests given to it and the steps that it returns.

Rules: a step has only live requests, each once, within the budgets; blocks exist, and no slot is
written that another live request owns; what is read was computed for the same tokens since the last
reset; admission is in order; ended requests are reported; outputs are the sampled tokens. The
Neuron kinds have rules of their own, neuron_ledger.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ...reference.paging import NULL_BLOCK_ID, num_blocks_for
from .. import NeuronPolicy, SchedulerConfig, SchedulerOutput
from .neuron_ledger import NeuronLedger
from .records import InvariantError, KVContent, Record, Slot, Work


class Ledger:
    """Follows one scheduler; every method raises InvariantError where a rule is broken.

    policy: what the scheduler was made with; None: it takes none, and promises no bounds.
    """

    def __init__(
        self, config: SchedulerConfig, *, is_neuron: bool, policy: NeuronPolicy | None
    ) -> None:
        self.config = config
        self.neuron = NeuronLedger(config, policy) if is_neuron else None
        self.live: dict[str, Record] = {}
        self.unreported: set[str] = set()
        """Ended since the latest step, which the next one reports."""
        self.arrivals = 0
        self.pause = 0
        self._content = KVContent(config.block_size)

    # Requests come and go.

    def add(self, given: Mapping[str, Any], refusal: Exception | None) -> None:
        """A request was given, and taken or refused."""
        name, config = given["id"], self.config
        if refusal is None:
            if name in self.live:
                raise InvariantError(f"{name} is taken although a request of this id lives")
            self.live[name] = Record.of(given, self.arrivals, config.policy)
            self.arrivals += 1
            return
        room = config.max_model_len - len(given["prompt"])
        whole = num_blocks_for(config.max_model_len, config.block_size)
        can_end = room > 0 and given.get("min_tokens", 0) <= min(room, given["max_tokens"])
        if name not in self.live and can_end and whole < config.num_blocks:
            raise InvariantError(f"{name} is refused although it can be served: {refusal}")

    def gone(self, name: str) -> None:
        """A request ended or was aborted."""
        del self.live[name]
        self.unreported.add(name)

    def reset(self, done: object, running: bool) -> None:
        """The prefix cache was reset, or the scheduler refused to."""
        if not isinstance(done, bool):
            raise InvariantError(f"reset_prefix_cache returns {done!r}, must be True or False")
        busy = [record.name for record in self.live.values() if record.table]
        if running:
            for record in self.live.values():
                if record.table:
                    record.lose_blocks()
                    record.reset_at = record.epoch
        if not done and (running or not busy):
            raise InvariantError("reset_prefix_cache refuses although nobody holds a block")
        if done and busy and not running:
            raise InvariantError(f"reset_prefix_cache succeeds although {busy} hold blocks")
        if done:
            self._content.clear()

    # A step.

    def step(self, output: SchedulerOutput, throttled: bool = False) -> list[Work]:
        """A step was scheduled; returns what it computes."""
        if output.finished_req_ids != self.unreported:
            raise InvariantError(
                f"finished_req_ids={output.finished_req_ids}: {self.unreported or 'nobody'} ended "
                "since the latest step"
            )
        self.unreported = set()
        counts = output.num_scheduled_tokens
        self._take_preemptions(output)
        waits = self.neuron and self.neuron.who_waits(self.live.values(), throttled, self.pause)
        self._check_budgets(counts, output)
        self._check_order(list(self._take_in(output)))
        if self.neuron and waits:
            prefills = [name for name in counts if self.live[name].is_prefill]
            self.neuron.step(output, prefills, waits)
        written: dict[Slot, str] = {}
        return [self._compute(self.live[name], output, written) for name in counts]

    def taken_back(self, output: SchedulerOutput, works: Iterable[Work]) -> None:
        """A step that another ledger judged failed: its rows may hold anything.

        Requests that it preempted have lost their blocks, to be reported by the next step.
        """
        for work in works:
            self._content.overwrite(work.record, work.start, work.start + work.count)
        for name in output.preempted_req_ids or ():
            if name in self.live and self.live[name].table:
                self.live[name].lose_blocks()

    def _take_preemptions(self, output: SchedulerOutput) -> None:
        victims = [self.live[n] for n in output.preempted_req_ids or () if n in self.live]
        victims = [record for record in victims if record.table]
        if victims and self.neuron:
            self.neuron.check_preemption([record.name for record in victims])
        for record in victims:
            record.lose_blocks()

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
        budget, most = self.config.step_token_budget, self.config.max_num_seqs
        running = {*counts, *(name for name, record in self.live.items() if record.table)}
        if total > budget or len(running) > most:
            raise InvariantError(
                f"{total} tokens of {len(running)} running requests: at most {budget} of {most} "
                "are allowed"
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
            self._start(record, list(new.block_ids[0]), new.num_computed_tokens)
            yield record
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            record = self.live[name]
            if not record.started:
                raise InvariantError(f"{name} was never reported as new")
            if name in cached.resumed_req_ids and not record.table:
                self._start(record, list(blocks[0]) if blocks else [], computed)
            elif name in cached.resumed_req_ids:
                record.table = list(blocks[0]) if blocks else []
            elif blocks:
                record.table = record.table + blocks[0]
            told = cached.all_token_ids.get(name, record.tokens)
            if list(told) != record.tokens:
                raise InvariantError(f"{name}: told tokens {told}, it has {record.tokens}")
            if computed != record.computed:
                raise InvariantError(f"{name}: {computed} tokens computed, {record.computed} are")

    def _start(self, record: Record, table: list[int], computed: int) -> None:
        record.started, record.table = True, table
        record.computed = record.settled = computed
        if computed and (record.skips_cache or not self.config.enable_prefix_caching):
            raise InvariantError(f"{record.name} has a prefix of {computed} tokens without cache")
        if self.pause:
            raise InvariantError(f"{record.name} is admitted although admission is paused")

    def _check_order(self, admitted: list[Record]) -> None:
        if not admitted:
            return
        last = max(record.order for record in admitted)
        waiting = [record for record in self.live.values() if not record.started]
        earlier = [record.name for record in waiting if record.order < last]
        if earlier:
            raise InvariantError(f"{admitted[-1].name} is admitted before {earlier}")

    # Tokens.

    def _compute(self, record: Record, output: SchedulerOutput, written: dict[Slot, str]) -> Work:
        count = output.num_scheduled_tokens[record.name]
        drafts = output.scheduled_spec_decode_tokens.get(record.name, [])
        start, end = record.computed, record.computed + count
        known = len(record.tokens) + record.placeholders
        if end - len(drafts) > known or len(drafts) >= count:
            raise InvariantError(
                f"{record.name} computes tokens {start} to {end} with {len(drafts)} drafts, of "
                f"{known} tokens"
            )
        is_padding = all(token == -1 for token in drafts)
        if not is_padding and drafts != record.drafts[: len(drafts)]:
            raise InvariantError(f"{record.name}: drafts {drafts}, proposed {record.drafts}")
        self._check_table(record, end)
        self._content.check_read(record)
        for position in range(start, end):
            slot = self._content.slot(record, position)
            owners = [r.name for r in self.live.values() if self._is_foreign(record, r, slot[0])]
            if slot in written or owners:
                other = written.get(slot) or owners[0]
                raise InvariantError(f"{record.name} writes block {slot[0]} of {other}")
            written[slot] = record.name
        settled = max(start, min(end, len(record.tokens)))
        self._content.write(record, start, settled)
        self._content.overwrite(record, settled, end)
        if start == record.settled:
            record.settled = settled
        samples = end - len(drafts) == known
        work = Work(record, start, count, len(drafts), samples, record.epoch, record.rejected)
        record.computed = end
        record.drafts = record.drafts if is_padding else []
        record.placeholders += (1 + len(drafts)) if work.samples else 0
        return work

    def _check_table(self, record: Record, end: int) -> None:
        table, config = record.table, self.config
        if len(table) * config.block_size < end:
            raise InvariantError(f"{record.name} computes {end} tokens in {len(table)} blocks")
        bad = [b for b in table if not 0 <= b < config.num_blocks or b == NULL_BLOCK_ID]
        if bad or len(set(table)) < len(table):
            raise InvariantError(f"{record.name} has the block table {table}")

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

    def deliver(
        self,
        works: list[Work],
        sampled: Mapping[str, list[int]],
        found: Mapping[str, tuple[list[int], str | None]],
    ) -> None:
        """Tokens came back, of which the update reported `found`: tokens and finish reasons.

        What was in flight when the cache was reset must be dropped; after another preemption a
        scheduler may keep it or not.
        """
        expected = {}
        for work in works:
            record, name = work.record, work.record.name
            if self.live.get(name) is not record or not work.samples:
                continue
            tokens = sampled[name]
            if work.is_stale and (work.epoch < record.reset_at or name not in found):
                continue
            if not work.is_stale:
                self._settle(work, work.drafts + 1 - len(tokens))
            expected[name] = record.take_in(tokens, self.config.max_model_len)
            if not work.is_stale:
                self._write_known(record)
        if found != expected:
            raise InvariantError(f"the outputs are {dict(found)}, must be {expected}")
        for name, (_, reason) in expected.items():
            if reason is not None:
                self.gone(name)

    def _settle(self, work: Work, rejected: int) -> None:
        """The tokens of a step are known; the runner computed them behind what was rejected."""
        record = work.record
        start = work.start - (record.rejected - work.rejected)
        end = start + work.count - rejected
        self._content.write(record, start, end)
        record.settled = max(record.settled, end)
        record.rejected += rejected
        record.computed -= rejected
        record.placeholders -= work.drafts + 1

    def _write_known(self, record: Record) -> None:
        """The step in flight computes the newest sampled token, which is known only now."""
        end = min(record.computed, len(record.tokens))
        self._content.write(record, record.settled, end)
        record.settled = max(record.settled, end)
