"""What a failure shows: the exception, what happened, and a pytest test to paste."""

import pprint

from .. import SchedulerConfig
from .run import Finding, Run


def describe(finding: Finding) -> str:
    """The scheduler's own traceback, the broken rule, and a line on each event."""
    run = Run(finding.subject, SchedulerConfig(**finding.config))
    try:
        for event in finding.events:
            run.apply(event)
        run.drain()
    except Exception:
        pass  # it is what the finding tells
    lines = [f"{number:>3}. {line}" for number, line in enumerate(run.log, 1)]
    return "\n".join(
        [
            *([finding.traceback.rstrip()] if finding.traceback else []),
            finding.message,
            f"config {finding.config}",
            *(f"  {line}" for line in lines),
        ]
    )


def reproducer(finding: Finding) -> str:
    """A pytest test that fails as long as the scheduler has the fault."""
    subject = finding.subject
    return "\n".join(
        [
            "from segattn.scheduler.testing import Subject, run_events",
            "",
            "",
            "def test_the_scheduler_keeps_its_rules():",
            f"    # {finding.message.splitlines()[0][:90]}",
            f"    subject = Subject.load({subject.name!r}, neuron={subject.neuron},",
            f"                           policy={dict(subject.policy)!r})",
            *_assigned("config", finding.config),
            *_assigned("events", finding.events),
            "    run_events(subject, config, events)",
        ]
    )


def _assigned(name: str, value: object) -> list[str]:
    first, *rest = pprint.pformat(value, width=80, sort_dicts=False).splitlines()
    return [f"    {name} = {first}", *(" " * (len(name) + 7) + line for line in rest)]
