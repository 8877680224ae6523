"""The rules of the Neuron kinds: no mixed step, one prefill at a time, the smallest bucket, no
preemption, and bounds on steps of one kind in a row.
"""

from collections.abc import Collection, Sequence

from ...reference.paging import num_blocks_for
from .. import NeuronPolicy, SchedulerConfig, SchedulerOutput
from .records import InvariantError, Record


class NeuronLedger:
    """Follows the steps of one Neuron scheduler.

    policy: what the scheduler was made with; None: it takes none, and promises no bounds.
    """

    def __init__(self, config: SchedulerConfig, policy: NeuronPolicy | None) -> None:
        self.config, self.policy = config, policy
        self._in_a_row: tuple[str, int] = ("", 0)
        num_rows = max(1, config.step_token_budget // (1 + config.num_speculative_tokens))
        self._num_rounds = -(-config.max_num_seqs // num_rows)
        """Steps that it may take to serve all decodes."""

    def key(self) -> tuple[str, int]:
        """All that later judgements depend on."""
        return self._in_a_row

    def who_waits(self, live: Collection[Record], throttled: bool, pause: int) -> tuple[bool, bool]:
        """Whether a step could be of decodes, and of a prefill."""
        running = [record for record in live if record.table]
        decodes = any(record.can_decode(self.config.max_model_len) for record in running)
        prefills = any(record.is_prefill for record in running)
        if not prefills and not pause and any(not record.started for record in live):
            prefills = self._fits(len(running) + 1)
        return decodes, prefills and not throttled

    def _fits(self, num_running: int) -> bool:
        """Whether so many requests fit, even if all of them grow to max_model_len."""
        config = self.config
        whole = num_blocks_for(config.max_model_len, config.block_size)
        needed = whole * num_running + config.watermark * config.num_blocks
        has_room = num_running <= (config.max_num_active_seqs or config.max_num_seqs)
        return has_room and needed <= config.num_blocks - 1

    def check_preemption(self, victims: list[str]) -> None:
        """The published designs preempt; ours never do."""
        if self.policy is None or not self.policy.is_literal:
            raise InvariantError(f"a preemption of {victims}")

    def step(
        self, output: SchedulerOutput, prefills: Sequence[str], waits: tuple[bool, bool]
    ) -> None:
        """A step was scheduled while decodes and prefills waited as `who_waits` says."""
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
        if self.policy is not None:
            kind = "prefill" if prefills else "decode" if counts else ""
            # A resumed request may find all of its tokens but one cached: it is the queue's turn.
            if kind == "decode" and output.scheduled_cached_reqs.resumed_req_ids:
                kind = ""
            self._check_bounds(kind, waits)

    def _check_bounds(self, kind: str, waits: tuple[bool, bool]) -> None:
        """Only steps count that keep somebody waiting who could run instead; "" keeps nobody."""
        assert self.policy is not None
        last, length = self._in_a_row
        keeps_waiting = bool(kind) and waits[kind == "decode"]
        length = (length if kind == last else 0) + 1 if keeps_waiting else 0
        limit = self.policy.max_consecutive_prefills
        if kind == "decode":
            limit = self.policy.max_consecutive_decodes * self._num_rounds
        if limit is None:
            length = 0
        elif length > limit:
            others = "decodes" if kind == "prefill" else "a prefill"
            raise InvariantError(
                f"{length} {kind} steps in a row keep {others} waiting, at most {limit}"
            )
        self._in_a_row = (kind, length) if length else ("", 0)
