"""Compare a scheduler with the NumPy model on random work: `segattn fuzz --kind neuron`.

A Hypothesis state machine drives both, step by step, until the time is over; the features that it
exercised are counted. A failure is shrunk and written as a trace that `segattn replay` reads.
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from segattn.benchmarks.fuzz.coverage import Coverage
from segattn.benchmarks.fuzz.machine import KINDS, SchedulerMachine, machine
from segattn.benchmarks.fuzz.shrink import shrink
from segattn.benchmarks.fuzz.strategies import default_policies
from segattn.benchmarks.whole_tables import print_whole
from segattn.reference.extras import MissingExtraError
from segattn.reference.scheduler_state import NeuronRules
from segattn.runner.cli import PARTLY_FAILED
from segattn.scheduler.trace import write_traces

from hypothesis import HealthCheck, Phase, seed, settings  # isort: skip - after strategies
from hypothesis import strategies as st  # isort: skip - the same
from hypothesis.stateful import run_state_machine_as_test  # isort: skip - the same

try:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table
except ImportError as error:
    raise MissingExtraError("rich", "cli") from error

RUNS_PER_ROUND = 20
EVENTS_PER_RUN = 40


def run_round(machine_class: type[SchedulerMachine], number: int) -> None:
    """Some runs of a machine; the same number gives the same runs. Raises what a run raises."""
    run_state_machine_as_test(
        seed(number)(machine_class),
        settings=settings(
            max_examples=RUNS_PER_ROUND,
            stateful_step_count=EVENTS_PER_RUN,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        ),
    )


def fuzz(
    machine_class: type[SchedulerMachine], minutes: float, first_round: int, console: Console
) -> int | None:
    """Run rounds until the time is over; the number of the round that failed, if one did."""
    start, end = time.monotonic(), time.monotonic() + 60 * minutes
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(machine_class.kind, total=end - start)
        number = first_round
        while number == first_round or time.monotonic() < end:
            try:
                run_round(machine_class, number)
            except Exception:  # any failure of the scheduler under test is the finding
                if machine_class.failure is None:
                    raise
                return number
            number += 1
            counts = machine_class.coverage.counts
            text = f"{machine_class.kind}: {(number - first_round) * RUNS_PER_ROUND} runs"
            done = min(time.monotonic(), end) - start
            progress.update(task, completed=done, description=f"{text}, {counts['steps']} steps")
    return None


def coverage_table(coverage: Coverage) -> Table:
    """What the runs exercised."""
    table = Table("feature", "times", title="coverage")
    for name in coverage.features:
        count = coverage.counts[name]
        table.add_row(name, str(count) if count else "not reached", style="" if count else "yellow")
    return table


def main(argv: Sequence[str]) -> int:
    """Command line; 1 if a run failed."""
    parser = argparse.ArgumentParser("segattn fuzz", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="neuron", help="scheduler (neuron)")
    parser.add_argument("--minutes", type=float, default=1.0, help="time to run (1)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first round (0)")
    parser.add_argument(
        "--policy",
        choices=("default", "documented"),
        default="default",
        help="Neuron policy: the default one with and without its options, or the documented one",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("fuzz-failure.jsonl.gz"), help="where a failure goes"
    )
    parser.add_argument("--record", type=Path, help="write the trace of every run to this file")
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.minutes < math.inf:
        parser.error(f"--minutes={arguments.minutes}: must be a number of at least 0")
    for path in (arguments.out, arguments.record):
        # Found out now, not when the time is over and there is something to write.
        if path is not None and not path.parent.is_dir():
            parser.error(f"{path}: its folder does not exist")
    is_documented = arguments.policy == "documented"
    policy = st.just(asdict(NeuronRules.documented())) if is_documented else default_policies()
    machine_class = machine(arguments.kind, policy, is_documented)
    if arguments.record is not None:
        machine_class.runs = []
    console = Console()
    failed = fuzz(machine_class, arguments.minutes, arguments.seed, console)
    print_whole(console, coverage_table(machine_class.coverage))
    if missing := machine_class.coverage.missing():
        console.print(f"not reached in this time: {', '.join(missing)}")
    if machine_class.runs is not None:
        write_traces(arguments.record, iter(machine_class.runs))
    if failed is None:
        console.print(f"no difference in {machine_class.coverage.counts['steps']} steps")
        return 0
    assert machine_class.failure is not None
    trace, message = shrink(machine_class.failure)
    write_traces(arguments.out, iter([trace]))
    print(f"failure in round {failed}: {message}")
    print(f"config {trace['config']}, policy {trace['policy']}")
    for event in trace["events"]:
        print(f"  {event}")
    print(f"{len(trace['events'])} events, which `segattn replay {arguments.out}` reads")
    return PARTLY_FAILED
