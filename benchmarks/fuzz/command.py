"""Compare a scheduler with the NumPy model on random work.

A Hypothesis state machine drives both, step by step, until the time is over; the features that it
exercised are counted. A failure is shrunk and written as a trace that `segattn replay` reads.
"""

import json
import math
import time
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from segattn.benchmarks.fuzz.coverage import Coverage
from segattn.benchmarks.fuzz.machine import KINDS, SchedulerMachine, machine
from segattn.benchmarks.fuzz.shrink import shrink
from segattn.benchmarks.fuzz.strategies import default_policies
from segattn.reference.outputs import OutputFile
from segattn.reference.scheduler_state import NeuronRules
from segattn.reference.terminal import columns, phase, table
from segattn.scheduler.testing.command import fuzz_scheduler
from segattn.scheduler.trace import write_traces

from hypothesis import HealthCheck, Phase, seed, settings  # isort: skip - after strategies
from hypothesis import strategies as st  # isort: skip - the same
from hypothesis.stateful import run_state_machine_as_test  # isort: skip - the same

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


def fuzz(machine_class: type[SchedulerMachine], minutes: float, first_round: int) -> int | None:
    """Run rounds until the time is over; the number of the round that failed, if one did."""
    start = time.monotonic()
    seconds = 60 * minutes
    number, shown = first_round, 0
    with phase(f"{machine_class.kind}: seconds of random runs", round(seconds)) as advance:
        while number == first_round or time.monotonic() - start < seconds:
            try:
                run_round(machine_class, number)
            except Exception:  # any failure of the scheduler under test is the finding
                if machine_class.failure is None:
                    raise
                return number
            number += 1
            done = min(int(time.monotonic() - start), round(seconds))
            advance(done - shown)
            shown = done
    return None


def coverage_table(coverage: Coverage) -> str:
    """What the runs exercised."""
    rows = [(name, coverage.counts[name] or "not reached") for name in coverage.features]
    return table("coverage", columns("feature", ">times"), rows)


def add_arguments(parser: ArgumentParser) -> None:
    """Scheduler, time, and where findings go."""
    parser.add_argument("--kind", choices=KINDS, default="neuron", help="scheduler (neuron)")
    parser.add_argument(
        "--scheduler",
        metavar="package.module:Class",
        help="a class of your own instead: judged by invariants alone, see docs/own_scheduler.md",
    )
    parser.add_argument("--config", type=Path, help="JSON of config, policy and neuron for it")
    parser.add_argument("--minutes", type=float, default=1.0, help="time to run (1)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first round (0)")
    parser.add_argument(
        "--policy",
        choices=("default", "documented"),
        default="default",
        help="Neuron policy: the default one with and without its options, or the documented one",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="where a failure goes (fuzz-failure.jsonl.gz, .json with --scheduler)",
    )
    parser.add_argument("--record", type=Path, help="write the trace of every run to this file")


def run(options: Namespace) -> int:
    """Fuzz until the time is over; 1 if a run failed."""
    if not 0 <= options.minutes < math.inf:
        options.parser.error(f"--minutes={options.minutes}: must be a number of at least 0")
    if options.out is None:
        options.out = Path("fuzz-failure.json" if options.scheduler else "fuzz-failure.jsonl.gz")
    if options.scheduler:
        return fuzz_scheduler(options)
    # Found out now, not when the time is over and there is something to write.
    OutputFile(options.out)
    if options.record is not None:
        OutputFile(options.record)
    is_documented = options.policy == "documented"
    policy = st.just(asdict(NeuronRules.documented())) if is_documented else default_policies()
    machine_class = machine(options.kind, policy, is_documented)
    if options.record is not None:
        machine_class.runs = []
    failed = fuzz(machine_class, options.minutes, options.seed)
    if machine_class.runs is not None:
        write_traces(options.record, iter(machine_class.runs))
    counts = machine_class.coverage.counts
    if not options.json:
        print(coverage_table(machine_class.coverage))
        if missing := machine_class.coverage.missing():
            print(f"not reached in this time: {', '.join(missing)}")
    if failed is None:
        found = f"no difference in {counts['steps']} steps"
        print(json.dumps({"failure": None, "coverage": counts}) if options.json else found)
        return 0
    assert machine_class.failure is not None
    trace, message = shrink(machine_class.failure)
    write_traces(options.out, iter([trace]))
    if options.json:
        failure = {"round": failed, "message": message, "trace": trace, "file": str(options.out)}
        print(json.dumps({"failure": failure, "coverage": counts}))
        return 1
    print(f"failure in round {failed}: {message}")
    print(f"config {trace['config']}, policy {trace['policy']}")
    for event in trace["events"]:
        print(f"  {event}")
    print(f"{len(trace['events'])} events, which `segattn replay {options.out}` reads")
    return 1
