"""State and rules of the scheduling model: arrays that `reference.scheduler` reads and writes.

Requests are rows of one structured array, queues are arrays of row numbers, a request's tokens,
drafts and blocks are integer arrays. Rows are never reused, so a row number names a request for
ever. Names follow vLLM; counts are in tokens unless they say blocks.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from .paging import NULL_BLOCK_ID, default_buckets, num_blocks_for

IntArray = NDArray[np.int64]

NO_TOKEN = -1
"""`eos` of a request without end-of-sequence token, and the value of a draft placeholder."""


class Status(IntEnum):
    """Life of a request; everything above PREEMPTED is finished. Names as in vLLM."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5


class Pause(IntEnum):
    """`PAUSED_NEW` admits nothing, `PAUSED_ALL` schedules nothing."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


@dataclass(frozen=True)
class NeuronRules:
    """Which variant of the Neuron rules holds; field by field the scheduler's `NeuronPolicy`."""

    kv_admission: str = "shared"
    max_consecutive_prefills: int | None = 4
    max_consecutive_decodes: int = 1
    design: str = "own"

    @property
    def literal(self) -> bool:
        """Whether a published design is followed to the letter."""
        return self.design != "own"

    @classmethod
    def documented(cls) -> "NeuronRules":
        """The rules exactly as the public design document of the Neuron scheduler has them."""
        return cls("worst_case", None, design="documented")


@dataclass(frozen=True)
class Rules:
    """Numbers of a scheduler; `num_blocks` includes the null block, `neuron` None = plain vLLM."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    max_num_scheduled_tokens: int | None = None
    num_speculative_tokens: int = 0
    num_lookahead_tokens: int = 0
    num_batched_tokens_buckets: tuple[int, ...] | None = None
    async_scheduling: bool = False
    neuron: NeuronRules | None = None

    @property
    def token_budget(self) -> int:
        """Most tokens of one step."""
        if self.max_num_scheduled_tokens is None:
            return self.max_num_batched_tokens
        return self.max_num_scheduled_tokens

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Padded sizes of a prefill step, ascending."""
        if self.num_batched_tokens_buckets is not None:
            return tuple(self.num_batched_tokens_buckets)
        return tuple(default_buckets(min(self.max_num_batched_tokens, self.max_model_len)))

    def blocks_ever_needed(self, prompt: int, max_tokens: int) -> int:
        """Most blocks that one request can come to own, counting drafts and lookahead.

        The last sampled token is never written, so its position needs no slot. Drafts can go
        beyond it; the asynchronous loop has two steps of them in flight.
        """
        drafts = self.num_speculative_tokens * (2 if self.async_scheduling else 1)
        written = min(prompt + max_tokens - 1 + drafts, self.max_model_len - 1)
        slots = min(written + self.num_lookahead_tokens, self.max_model_len)
        return num_blocks_for(slots, self.block_size)


REQUEST = np.dtype(
    [
        ("status", np.int8),
        ("prompt", np.int64),
        ("max_tokens", np.int64),
        ("arrival", np.float64),
        ("priority", np.int64),
        ("eos", np.int64),
        ("min_tokens", np.int64),
        ("salt", np.int64),
        ("skip_read", np.bool_),
        ("computed", np.int64),
        ("placeholders", np.int64),
        ("in_flight", np.int64),  # tokens of steps that have not come back
        ("stale", np.int64),  # those of them from before the latest preemption
        ("drop", np.bool_),  # what they sample is dropped
        ("no_drafts", np.bool_),
        ("served", np.int64),  # decode step that served it last, if not all fit into one
        ("preemptions", np.int64),
        ("hashed", np.int64),  # leading blocks of the request that are in the prefix cache
        ("chunk", np.bool_),  # known tokens were left over after its last step
        ("admitted", np.int64),  # serial number of its last admission
        ("stop_reason", np.int64),
    ]
)


def integers(values: object = ()) -> IntArray:
    """Any sequence of integers as an array; empty by default."""
    return np.asarray(values, dtype=np.int64).reshape(-1)


@dataclass
class Pool:
    """KV blocks. `free` lists block ids in the order in which they are handed out.

    refs [num_blocks]: owners of each block. content [num_blocks]: what a cached block holds, as
    the whole prefix up to its end (salt and tokens), b"" = not cached. stamp [num_blocks]: age of
    the cache entry; of two blocks with the same content the older one is found.
    """

    free: IntArray
    refs: IntArray
    stamp: IntArray
    content: list[bytes]

    @classmethod
    def of(cls, num_blocks: int) -> "Pool":
        """All blocks free except the null block, which is never handed out."""
        blocks = integers(range(num_blocks))
        refs = np.zeros(num_blocks, dtype=np.int64)
        return cls(blocks[blocks != NULL_BLOCK_ID], refs, refs.copy(), [b""] * num_blocks)


@dataclass
class State:
    """Everything a decision depends on.

    waiting, running: rows in queue order. finished, preempted: ids that the next decision reports.
    hidden: running and waiting requests that this step does not see but counts.
    previous: rows of the last step. padding: padded minus real prefill tokens so far.
    """

    pool: Pool
    requests: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, dtype=REQUEST))
    ids: list[str] = field(default_factory=list)
    salts: list[str] = field(default_factory=lambda: [""])
    tokens: list[IntArray] = field(default_factory=list)
    drafts: list[IntArray] = field(default_factory=list)
    blocks: list[IntArray] = field(default_factory=list)
    stop_tokens: list[IntArray] = field(default_factory=list)
    waiting: IntArray = field(default_factory=integers)
    running: IntArray = field(default_factory=integers)
    previous: IntArray = field(default_factory=integers)
    finished: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    pause: Pause = Pause.UNPAUSED
    admissions: int = 0
    phase: str = "IDLE"
    padding: int = 0
    consecutive_prefills: int = 0
    decodes_due: int = 0
    stuck: bool = False
    hidden: tuple[int, int] = (0, 0)

    def live(self) -> IntArray:
        """Rows that have not finished, in the order in which they were added."""
        return integers(np.flatnonzero(self.requests["status"] <= int(Status.PREEMPTED)))

    def row_of(self, request_id: str) -> int | None:
        """Row of the live request with this id."""
        rows = [int(row) for row in self.live() if self.ids[row] == request_id]
        return rows[0] if rows else None

    def num_tokens(self, row: int) -> int:
        """Known tokens: prompt and appended outputs."""
        return len(self.tokens[row])


def without(rows: IntArray, row: int) -> IntArray:
    """The queue without this row, order kept."""
    return integers(rows[rows != row])
