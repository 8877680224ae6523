"""What the Neuron policies do to latency, on a virtual clock.

The real scheduler decides, a cost table says how long each step takes, nothing is computed. So the
times are modelled; they compare policies, they do not predict a device. The workload is synthetic
(Poisson arrivals, log-normal lengths) or a file of JSON lines with `arrival_s`, `prompt_tokens` and
`output_tokens`. Columns: TTFT (time to the first token) and ITL (time between two tokens of a
request, the longest such gap included) in milliseconds, running requests on average over time,
share of the rows that is padding, seconds until the last token, requests that were refused or never
finished. Below: why requests waited, one count per waiting request and step.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from segattn.benchmarks.scheduler.arrivals import Arrival, read_workload, synthetic
from segattn.reference.paging import smallest_bucket
from segattn.reference.terminal import phase
from segattn.scheduler import (
    ModelRunnerOutput,
    NeuronPolicy,
    Request,
    SchedulerConfig,
    SchedulerOutput,
)
from segattn.scheduler.testing import Subject
from segattn.scheduler.testing.command import add_subject_arguments, subject_of

POLICIES = {
    "documented": NeuronPolicy.documented(),
    "default": NeuronPolicy(),
    "max_consecutive_prefills=1": NeuronPolicy(max_consecutive_prefills=1),
    "kv_admission=reserved": NeuronPolicy(kv_admission="reserved"),
    "kv_admission=worst_case": NeuronPolicy(kv_admission="worst_case"),
}

CONFIG: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "max_model_len": 8192,
    "block_size": 32,
    # Room for 8 requests of max_model_len; one more block, for the null block, and the documented
    # bound equals the real one.
    "num_blocks": 8 * 8192 // 32 + 1,
}
"""What is not in --config."""

HEADINGS = {
    "ttft_mean_ms": ("TTFT", "mean"),
    "ttft_p99_ms": ("TTFT", "p99"),
    "itl_p50_ms": ("ITL", "p50"),
    "itl_p99_ms": ("ITL", "p99"),
    "longest_gap_ms": ("ITL", "max"),
    "concurrency": ("run-", "ning"),
    "padding": ("pad-", "ding"),
    "total_s": ("total", "s"),
    "not_served": ("not", "done"),
}
"""Two lines of heading for each column of `Outcome.row`."""

FORMATS = {"concurrency": ".1f", "padding": ".1%", "total_s": ".1f"}


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a step: fixed, per padded prefill token, per row of the decode batch."""

    fixed_ms: float = 4.0
    prefill_token_ms: float = 0.02
    decode_row_ms: float = 0.25

    def of(
        self, output: SchedulerOutput, is_prefill: bool, decode_buckets: Sequence[int]
    ) -> tuple[float, int]:
        """Milliseconds and padded rows of a step."""
        padded = output.num_scheduled_tokens_padded or {}
        if not padded:
            return 0.0, 0
        rows = sum(padded.values())
        if is_prefill:
            return self.fixed_ms + self.prefill_token_ms * rows, rows
        rows = smallest_bucket(rows, decode_buckets)
        return self.fixed_ms + self.decode_row_ms * rows, rows


@dataclass
class Outcome:
    """What the requests of one simulation saw; times in milliseconds."""

    first_token_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    num_unfinished: int = 0
    num_refused: int = 0
    end_ms: float = 0.0
    running_ms: float = 0.0
    """Running requests, summed over the time."""
    rows: int = 0
    tokens: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    """Waiting requests by reason, summed over the steps."""

    def row(self) -> dict[str, float]:
        """The columns of the table."""
        return {
            "ttft_mean_ms": sum(self.first_token_ms) / max(1, len(self.first_token_ms)),
            "ttft_p99_ms": percentile(self.first_token_ms, 99),
            "itl_p50_ms": percentile(self.gaps_ms, 50),
            "itl_p99_ms": percentile(self.gaps_ms, 99),
            "longest_gap_ms": max(self.gaps_ms, default=0.0),
            "concurrency": self.running_ms / self.end_ms if self.end_ms else 0.0,
            "padding": 1 - self.tokens / self.rows if self.rows else 0.0,
            "total_s": self.end_ms / 1000,
            "not_served": self.num_unfinished + self.num_refused,
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed; 0 for none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


class Simulation:
    """One scheduler that serves a workload on a virtual clock, through its interface alone."""

    def __init__(self, subject: Subject, config: SchedulerConfig, policy: NeuronPolicy) -> None:
        self.scheduler = subject.make(config, asdict(policy))
        self.outcome = Outcome()
        self.now = 0.0
        self._config = config
        self._latest: dict[str, float] = {}
        self._known: dict[str, int] = {}
        """Tokens of each live request: its prompt and what was sampled."""
        self._running: dict[str, bool] = {}
        """Whether each running request has a first token."""

    def add(self, name: str, arrival: Arrival, first_token: int) -> None:
        """A request arrives."""
        self._latest[name] = 1000 * arrival.arrival_s
        self._known[name] = arrival.prompt_tokens
        prompt = [first_token] * arrival.prompt_tokens
        try:
            self.scheduler.add_request(Request(name, prompt, arrival.output_tokens))
        except ValueError:
            self.outcome.num_refused += 1
            del self._known[name]

    def step(self, costs: StepCosts, next_arrival_ms: float | None) -> bool:
        """One step; False if nothing goes on any more."""
        output: SchedulerOutput = self.scheduler.schedule()
        is_prefill = output.step_kind == "prefill"
        duration, rows = costs.of(output, is_prefill, self._config.decode_buckets)
        counts = output.num_scheduled_tokens
        if not counts and self._known:
            if next_arrival_ms is None:
                return False
            duration = max(0.0, next_arrival_ms - self.now)
        self.now += duration
        for name in counts:
            self._running.setdefault(name, False)
        self.outcome.running_ms += len(self._running) * duration
        self.outcome.rows += rows
        self.outcome.tokens += output.total_num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        sampled = [self._sample(name, computed[name] + n) for name, n in counts.items()]
        results = ModelRunnerOutput(list(counts), sampled)
        for done in self.scheduler.update_from_output(output, results):
            if done.finish_reason is not None:
                del self._running[done.request_id], self._known[done.request_id]
        return True

    def _sample(self, name: str, computed: int) -> list[int]:
        """A token if all known ones are computed; takes the time."""
        if computed < self._known[name]:
            return []
        self._known[name] += 1
        times = self.outcome.gaps_ms if self._running[name] else self.outcome.first_token_ms
        times.append(self.now - self._latest[name])
        self._latest[name], self._running[name] = self.now, True
        return [1]

    def end(self) -> Outcome:
        """What the requests saw."""
        self.outcome.num_unfinished, self.outcome.end_ms = len(self._known), self.now
        counts = getattr(self.scheduler, "admission_counts", {})
        self.outcome.waiting = {reason.value: count for reason, count in counts.items() if count}
        return self.outcome


def simulate(
    config: SchedulerConfig,
    policy: NeuronPolicy,
    arrivals: Sequence[Arrival],
    costs: StepCosts,
    subject: Subject | None = None,
) -> Outcome:
    """Serve the workload; a scheduler that schedules nothing although requests wait is given up."""
    run = Simulation(subject or Subject.own("neuron"), config, policy)
    coming = list(enumerate(arrivals))[::-1]
    while coming or run.scheduler.has_requests():
        if not run.scheduler.has_requests():
            run.now = max(run.now, 1000 * coming[-1][1].arrival_s)
        while coming and 1000 * coming[-1][1].arrival_s <= run.now:
            number, arrival = coming.pop()
            # Different first tokens: no prompt shares a prefix with another.
            run.add(f"r{number}", arrival, number + 1)
        if not run.step(costs, 1000 * coming[-1][1].arrival_s if coming else None):
            break
    return run.end()


def add_arguments(parser: ArgumentParser) -> None:
    """What arrives, and a scheduler of one's own."""
    add_subject_arguments(parser)
    parser.add_argument("--workload", type=Path, help="a file of JSON lines instead of arrivals")
    parser.add_argument("--requests", type=int, default=150, help="requests that arrive (150)")
    parser.add_argument("--rate", type=float, default=8.0, help="arrivals per second (8)")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals (0)")


def run(options: Namespace) -> int:
    """Simulate every policy and print two tables."""
    if options.requests < 1 or not 0 < options.rate < float("inf"):
        options.parser.error("--requests must be at least 1 and --rate a number above 0")
    arrivals = (
        synthetic(options.requests, options.rate, options.seed)
        if options.workload is None
        else read_workload(options.workload)
    )
    subject, given = subject_of(options)
    if not subject.is_neuron or subject.depth > 1:
        options.parser.error(f"--kind {subject.kind}: must be neuron")
    config = SchedulerConfig(**CONFIG | given.config)
    candidates = {name: (Subject.own("neuron"), policy) for name, policy in POLICIES.items()}
    if options.scheduler or given.policy:
        name = options.scheduler or f"policy of {options.config.name}"
        candidates[name] = subject, NeuronPolicy(**given.policy)
    outcomes = {}
    with phase("simulating policies", len(candidates)) as advance:
        for name, (scheduler, policy) in candidates.items():
            outcomes[name] = simulate(config, policy, arrivals, StepCosts(), scheduler)
            advance(1)
    if options.json:
        for name, outcome in outcomes.items():
            print(json.dumps({"policy": name} | outcome.row() | {"waiting": outcome.waiting}))
        return 0
    rows = {name: outcome.row() for name, outcome in outcomes.items()}
    _print_table("modelled times, ms", HEADINGS, rows, FORMATS)
    reasons = sorted({reason for outcome in outcomes.values() for reason in outcome.waiting})
    headings = {reason: _two_lines(reason) for reason in reasons}
    if not reasons:
        return 0
    print()
    waiting = {name: outcome.waiting for name, outcome in outcomes.items()}
    _print_table("waiting, request-steps", headings, waiting, {})
    return 0


def _two_lines(reason: str) -> tuple[str, str]:
    first, _, rest = reason.partition("_")
    return (first, rest) if rest else ("", first)


def _print_table(
    title: str,
    headings: Mapping[str, tuple[str, str]],
    rows: Mapping[str, Mapping[str, float]],
    formats: Mapping[str, str],
) -> None:
    """A table of at most 80 columns for at most nine headings."""
    width = max(6, *(1 + len(line) for lines in headings.values() for line in lines))
    for first, lines in zip((title, ""), zip(*headings.values(), strict=True), strict=True):
        print(f"{first:<26}" + "".join(f"{line:>{width}}" for line in lines))
    for name, row in rows.items():
        cells = (format(row.get(column, 0), formats.get(column, ".0f")) for column in headings)
        print(f"{name:<26}" + "".join(f"{cell:>{width}}" for cell in cells))
