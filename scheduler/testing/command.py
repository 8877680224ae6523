"""Fuzz a scheduler of one's own from the command line, and replay what was found."""

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ...reference.json_files import FormatError, read_object, required
from ...reference.outputs import OutputFile
from ...reference.terminal import phase, printable
from .. import SchedulerConfig
from .report import describe, reproducer
from .run import Finding, fuzz, run_events
from .subject import Subject

FORMAT = "segattn fuzz 1"


def read_config(path: Path | None) -> dict[str, Any]:
    """{"config": fields of SchedulerConfig, "policy": of NeuronPolicy, "neuron": bool}."""
    found = read_object(path) if path else {}
    if unknown := found.keys() - {"config", "policy", "neuron"}:
        raise FormatError(f"{path}: unknown key {min(unknown)!r}, must be config, policy or neuron")
    known = {field.name for field in fields(SchedulerConfig) if field.init}
    if wrong := found.get("config", {}).keys() - known:
        raise FormatError(f"{path}: config has no {min(wrong)!r}, must be one of {sorted(known)}")
    return {"config": {}, "policy": {}, "neuron": True} | found


def fuzz_scheduler(options: Namespace) -> int:
    """Fuzz the class of --scheduler until the time is over; 1 if a run failed."""
    out = OutputFile(options.out)
    given = read_config(options.config)
    subject = Subject.load(options.scheduler, neuron=given["neuron"], policy=given["policy"])
    seconds = 60 * options.minutes
    shown = 0
    with phase(f"seconds of random runs of {options.scheduler}", round(seconds)) as advance:

        def tell(elapsed: float) -> None:
            nonlocal shown
            done = min(int(elapsed), round(seconds))
            advance(done - shown)
            shown = done

        found = fuzz(subject, seconds=seconds, seed=options.seed, config=given["config"], tell=tell)
    if found is None:
        print(json.dumps({"failure": None}) if options.json else "no rule was broken")
        return 0
    out.save_json(to_json(found))
    if options.json:
        print(json.dumps({"failure": found.message, "file": str(options.out), **to_json(found)}))
        return 1
    print(printable(describe(found), "\n"))
    print(f"\n`segattn replay {options.out}` runs it again; as a test:\n")
    print(reproducer(found))
    return 1


def to_json(found: Finding) -> dict[str, Any]:
    """What `replay_finding` reads."""
    subject = found.subject
    return {
        "format": FORMAT,
        "scheduler": subject.name,
        "neuron": subject.neuron,
        "policy": dict(subject.policy),
        "config": found.config,
        "events": found.events,
    }


def replay_finding(path: Path) -> tuple[str, str | None]:
    """Run a written failure on the class that failed: its name, and how it fails (None: not)."""
    found = read_object(path)
    if found.get("format") != FORMAT:
        raise FormatError(f"{path}: not a failure that `segattn fuzz --scheduler` wrote")
    name, policy, config, events = (
        required(found, key, str(path)) for key in ("scheduler", "policy", "config", "events")
    )
    if not (isinstance(policy, Mapping) and isinstance(config, Mapping) and isinstance(name, str)):
        raise FormatError(f"{path}: scheduler must be a text, policy and config objects")
    subject = Subject.load(name, neuron=bool(found.get("neuron", True)), policy=policy)
    try:
        run_events(subject, config, events)
    except Exception as error:  # whatever the scheduler under test raises is the result
        return name, f"{type(error).__name__}: {error}"
    return name, None
