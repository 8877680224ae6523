"""Try a scheduler with random work: ours, or any class of your own.

A Hypothesis state machine drives it, step by step, until the time is over; the features that it
exercised are counted. The judge is the NumPy model of vLLM's scheduler (--rules model, for our own
kinds) or the invariants alone (for --scheduler). A failure is shrunk, printed with a pytest test to
paste, and written as a file that `segattn replay` runs again on the same class.
"""

import json
import math
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...reference.json_files import FormatError, read_object, shown
from ...reference.outputs import OutputFile
from ...reference.terminal import columns, one_line, phase, table
from .. import NeuronPolicy, SchedulerConfig
from .coverage import Coverage
from .report import describe, reproducer
from .subject import KINDS, Subject
from .trace_file import pack_traces
from .trial import RULES

POLICIES = {"documented": {"kv_admission": "worst_case", "max_consecutive_prefills": None}}
POLICIES["shipped"] = POLICIES["documented"]


PLAIN: dict[str, Any] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1 << 20,
    "max_model_len": 1 << 20,
    "block_size": 1,
    "num_blocks": 2,
}
"""A configuration beside which the fields of a --config file are checked one by one."""


@dataclass(frozen=True)
class Given:
    """A --config file: the scheduler's kind, fields of SchedulerConfig and of NeuronPolicy."""

    kind: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None) -> "Given":
        """FormatError naming the file, the place and what is allowed."""
        found = read_object(path) if path else {}
        for name, known in (("config", SchedulerConfig), ("policy", NeuronPolicy), ("", cls)):
            part = found.get(name, {}) if name else found
            allowed = [entry.name for entry in fields(known) if entry.init]
            place = f"{path}: {name}" if name else str(path)
            if not isinstance(part, dict):
                raise FormatError(f"{place} is {shown(part)}, must be a JSON object")
            for key in part:
                if key not in allowed:
                    raise FormatError(f"{place} has {shown(key)}, must be one of {allowed}")
        kind = found.get("kind")
        if kind is not None and kind not in KINDS:
            raise FormatError(f"{path}: kind={shown(kind)}: must be one of {', '.join(KINDS)}")
        try:
            NeuronPolicy(**found.get("policy", {}))
            SchedulerConfig(**PLAIN | found.get("config", {}))
        except (ValueError, TypeError) as error:
            raise FormatError(f"{path}: {error}") from error
        return cls(**found)


def add_subject_arguments(parser: ArgumentParser) -> None:
    """The scheduler under test; shared by all commands that take one."""
    parser.add_argument(
        "--scheduler",
        metavar="package.module:Class",
        help="a class of your own instead of ours, see docs/own_scheduler.md",
    )
    parser.add_argument("--kind", choices=KINDS, help="whose rules it keeps (neuron)")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="JSON: kind, config, policy to keep fixed"
    )


def subject_of(options: Namespace) -> tuple[Subject, Given]:
    """The scheduler that the arguments name, and what --config fixes."""
    given = Given.read(options.config)
    kind = options.kind or given.kind or "neuron"
    name = options.scheduler
    return (Subject.load(name, kind) if name else Subject.own(kind)), given


def add_arguments(parser: ArgumentParser) -> None:
    """Scheduler, time, and where findings go."""
    add_subject_arguments(parser)
    parser.add_argument(
        "--rules",
        choices=RULES,
        help="what judges it (model for our kinds, invariants for --scheduler)",
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="time to run (1)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first round (0)")
    parser.add_argument(
        "--policy",
        choices=("default", *POLICIES),
        default="default",
        help="Neuron policy: the default one with and without its options, or a published one",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("fuzz-failure.jsonl.gz"),
        help="where a failure goes (fuzz-failure.jsonl.gz)",
    )
    parser.add_argument("--record", type=Path, help="write the trace of every run to this file")


def run(options: Namespace) -> int:
    """Fuzz until the time is over; 1 if a run failed."""
    if not 0 <= options.minutes < math.inf:
        options.parser.error(f"--minutes={options.minutes}: must be a number of at least 0")
    # Found out now, not when the time is over and there is something to write.
    out = OutputFile(options.out)
    record = OutputFile(options.record) if options.record is not None else None
    subject, given = subject_of(options)
    from .fuzzing import campaign_until  # it needs Hypothesis, `replay` does not
    from .machine import Campaign
    from .shrink import NotReproducedError, shrink

    policy = given.policy
    if options.policy != "default":
        policy = {"design": options.policy, **POLICIES[options.policy]}
    rules = options.rules or ("invariants" if options.scheduler else "model")
    campaign = Campaign(subject, rules, given.config, policy, keeps_runs=record is not None)
    seconds, done = 60 * options.minutes, 0
    with phase(f"{subject.name}: seconds of random runs", round(seconds)) as advance:

        def tell(elapsed: float) -> None:
            nonlocal done
            now = min(int(elapsed), round(seconds))
            advance(now - done)
            done = now

        campaign_until(campaign, seconds, options.seed, tell)
    if record is not None:
        record.save(pack_traces(campaign.runs))
    counts = campaign.coverage.counts
    if campaign.failure is None:
        if options.json:
            print(json.dumps({"failure": None, "coverage": counts}))
            return 0
        print(coverage_table(campaign.coverage))
        if missing := campaign.coverage.missing():
            print(f"not reached in this time: {', '.join(missing)}")
        what = "no difference" if rules == "model" else "no rule was broken"
        print(f"{what} in {counts['steps']} steps")
        return 0
    try:
        found = shrink(campaign.failure)
    except NotReproducedError:
        found = campaign.failure
        note = "does not fail when run again: its decisions depend on more than its inputs"
        print(one_line(f"{subject.name}: {note}"), file=sys.stderr)
    out.save(pack_traces([found.trace]))
    if options.json:
        failure = {"message": found.message, "trace": found.trace, "file": str(options.out)}
        print(json.dumps({"failure": failure, "coverage": counts}))
        return 1
    print(describe(found))
    print(f"\n`segattn replay {options.out}` runs it again; as a test:\n")
    print(reproducer(found))
    return 1


def coverage_table(coverage: Coverage) -> str:
    """What the runs exercised."""
    rows = [(name, coverage.counts[name] or "not reached") for name in coverage.features]
    return table("coverage", columns("feature", ">times"), rows)
