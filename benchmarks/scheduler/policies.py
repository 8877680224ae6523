"""`segattn bench policies`: what the Neuron policies do to latency, on a virtual clock.

The real scheduler decides, a cost table says how long each step takes, nothing is computed. So the
times are modelled; they compare policies, they do not predict a device. The workload is synthetic
(Poisson arrivals, log-normal lengths) or a file of JSON lines with `arrival_s`, `prompt_tokens` and
`output_tokens`. Columns: time to the first token, time between tokens of a request, the longest
such gap, running requests on average over time, share of padded rows.
"""

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from segattn.reference.paging import smallest_bucket
from segattn.scheduler import (
    ModelRunnerOutput,
    NeuronPolicy,
    NeuronScheduler,
    Request,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerState,
)

POLICIES = {
    "documented": NeuronPolicy.documented(),
    "default": NeuronPolicy(),
    "max_consecutive_prefills=1": NeuronPolicy(max_consecutive_prefills=1),
    "max_consecutive_prefills=4": NeuronPolicy(max_consecutive_prefills=4),
    "reserved": NeuronPolicy(kv_admission="reserved"),
    "reserved, max_consecutive_prefills=4": NeuronPolicy(
        kv_admission="reserved", max_consecutive_prefills=4
    ),
}


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


@dataclass(frozen=True)
class Arrival:
    """A request of the workload."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


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
            "unfinished": self.num_unfinished + self.num_refused,
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed; 0 for none."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def synthetic(count: int, per_second: float, seed: int) -> list[Arrival]:
    """Arrivals at random times; prompts of 800 tokens and outputs of 120 in the median."""
    rng = random.Random(seed)
    arrivals, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(per_second)
        prompt = min(6000, max(16, round(rng.lognormvariate(math.log(800), 0.9))))
        output = min(1500, max(2, round(rng.lognormvariate(math.log(120), 0.7))))
        arrivals.append(Arrival(now, prompt, output))
    return arrivals


def read_workload(path: Path) -> list[Arrival]:
    """The workload of a file of JSON lines, in order of arrival. ValueError for a bad line."""
    arrivals = []
    names = {one.name for one in fields(Arrival)}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        given = json.loads(line)
        if set(given) != names:
            raise ValueError(f"{path}:{number}: keys {sorted(given)} must be {sorted(names)}")
        arrivals.append(Arrival(**given))
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


def simulate(
    config: SchedulerConfig, policy: NeuronPolicy, arrivals: Sequence[Arrival], costs: StepCosts
) -> Outcome:
    """Serve the workload; a scheduler that schedules nothing although requests wait is given up."""
    scheduler = NeuronScheduler(config, policy)
    outcome = Outcome()
    latest: dict[str, float] = {}
    coming = list(enumerate(arrivals))[::-1]
    now = 0.0
    while coming or scheduler.has_requests():
        if not scheduler.has_requests() and coming:
            now = max(now, 1000 * coming[-1][1].arrival_s)
        while coming and 1000 * coming[-1][1].arrival_s <= now:
            number, arrival = coming.pop()
            latest[f"r{number}"] = 1000 * arrival.arrival_s
            # Different first tokens: no prompt shares a prefix with another.
            prompt = [number + 1] * arrival.prompt_tokens
            try:
                scheduler.add_request(Request(f"r{number}", prompt, arrival.output_tokens))
            except ValueError:
                outcome.num_refused += 1
        output = scheduler.schedule()
        is_prefill = scheduler.state is SchedulerState.ACTIVE_PREFILL
        duration, rows = costs.of(output, is_prefill, config.decode_buckets)
        if not output.num_scheduled_tokens and scheduler.get_num_unfinished_requests():
            if not coming:
                break
            duration = max(0.0, 1000 * coming[-1][1].arrival_s - now)
        now += duration
        outcome.running_ms += len(scheduler.running) * duration
        outcome.rows += rows
        outcome.tokens += output.total_num_scheduled_tokens
        _deliver(scheduler, output, now, latest, outcome)
    outcome.num_unfinished = scheduler.get_num_unfinished_requests()
    outcome.end_ms = now
    return outcome


def _deliver(
    scheduler: NeuronScheduler,
    output: SchedulerOutput,
    now: float,
    latest: dict[str, float],
    outcome: Outcome,
) -> None:
    """Sample a token for each request whose known tokens are computed, and take the times."""
    requests = scheduler.requests
    sampled: list[list[int]] = []
    for request_id in output.num_scheduled_tokens:
        request = requests[request_id]
        if request.is_prefill_chunk:
            sampled.append([])
            continue
        times = outcome.gaps_ms if request.num_output_tokens else outcome.first_token_ms
        times.append(now - latest[request_id])
        latest[request_id] = now
        sampled.append([1])
    scheduler.update_from_output(
        output, ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser("segattn bench policies", description=__doc__)
    parser.add_argument("--workload", type=Path, help="a file of JSON lines instead of arrivals")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rate", type=float, default=8.0, help="arrivals per second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one object per line")
    options = parser.parse_args(argv)
    arrivals = (
        synthetic(options.requests, options.rate, options.seed)
        if options.workload is None
        else read_workload(options.workload)
    )
    config = SchedulerConfig(
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        max_model_len=8192,
        block_size=32,
        # Room for 8 requests of max_model_len; one more block, for the null block, and the
        # documented bound equals the real one.
        num_blocks=8 * 8192 // 32 + 1,
    )
    title = f"{'modelled times':<38}"
    for name, policy in POLICIES.items():
        row = simulate(config, policy, arrivals, StepCosts()).row()
        if options.json:
            print(json.dumps({"policy": name} | row), flush=True)
            continue
        if title:
            print(title + "".join(f"{column:>16}" for column in row))
            title = ""
        print(f"{name:<38}" + "".join(f"{value:>16.2f}" for value in row.values()), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
