"""What a failure shows: the exception, what happened, and a pytest test to paste."""

import pprint
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...reference.terminal import columns, printable, table
from ..config import PauseState
from .trace import Event
from .trial import Finding


def describe(finding: Finding) -> str:
    """The scheduler's own traceback, what is wrong, the configuration, a table of the events."""
    lines = [printable(finding.traceback.rstrip(), "\n")] if finding.traceback else []
    lines += [f"{finding.subject.name}: {printable(finding.message)}", ""]
    settings = [(name, value) for name, value in finding.config.items()]
    settings += [(f"NeuronPolicy.{name}", value) for name, value in finding.policy.items()]
    lines += [table("configuration", columns("field", "value"), settings), ""]
    rows = [(number, *row) for number, row in enumerate(event_rows(finding.events), 1)]
    lines.append(table("events", columns(">no", "event", "given", "came out"), rows))
    return "\n".join(lines)


def event_rows(events: Sequence[Event]) -> Iterator[tuple[str, str, str]]:
    """Each event with what was given and what came out of it; of the failing one nothing did."""
    for name, *rest in events:
        yield (name, *_ROWS[name](*rest))


def _add(given: Mapping[str, Any], refusal: str = "") -> tuple[str, str]:
    options = [
        f"{key}={value}"
        for key, value in given.items()
        if key not in ("id", "prompt", "arrival") and value is not None
    ]
    return f"{given['id']}: {len(given['prompt'])} tokens, {', '.join(options)}", refusal


def _abort(ids: list[str], done: Sequence[str] | None = None) -> tuple[str, str]:
    return ", ".join(ids), "" if done is None else f"ended: {', '.join(done) or 'nobody'}"


def _reset(running: int, done: object = "", *_: object) -> tuple[str, str]:
    return "running requests too" if running else "prefix cache", str(done)


def _pause(state: int) -> tuple[str, str]:
    return PauseState(state).name, ""


def _drafts(drafts: list[Any]) -> tuple[str, str]:
    return ", ".join(f"{name}: {tokens}" for name, tokens in drafts), ""


def _schedule(step: int, seen: Mapping[str, Any] | None = None) -> tuple[str, str]:
    seen = seen or {}
    given = f"step {step}" + (", throttled" if "throttle" in seen else "")
    if "error" in seen:
        return given, seen["error"]
    padded = dict(seen.get("pad", ()))
    parts = []
    for name, count in seen.get("nst", ()):
        more = f" of {padded[name]}" if padded.get(name, count) != count else ""
        parts.append(f"{name}: {count}{more}")
    if seen.get("pre"):
        parts.append(f"preempted {', '.join(seen['pre'])}")
    return given, "; ".join(parts) or ("nothing" if "nst" in seen else "")


def _update(
    step: int, sampled: list[Any], seen: Mapping[str, Any] | None = None
) -> tuple[str, str]:
    given = ", ".join(f"{name}: {tokens}" for name, tokens in sampled if tokens)
    ended = [f"{name} ends: {why}" for name, _, why, _ in (seen or {}).get("outs", ()) if why]
    return f"step {step}" + (f", {given}" if given else ", no tokens"), "; ".join(ended)


_ROWS: dict[str, Any] = {
    "add": _add,
    "abort": _abort,
    "reset": _reset,
    "pause": _pause,
    "drafts": _drafts,
    "schedule": _schedule,
    "fail": _schedule,
    "update": _update,
}


def inputs(events: Sequence[Event]) -> list[Event]:
    """The events without what was seen."""
    given = []
    for event in events:
        is_throttled = event[0] == "schedule" and "throttle" in (event[2:] or [{}])[0]
        size = 3 if event[0] == "update" else 2
        given.append([*event[:2], {"throttle": 1}] if is_throttled else event[:size])
    return given


def reproducer(finding: Finding) -> str:
    """A pytest test that fails as long as the scheduler has the fault."""
    subject = finding.subject
    return "\n".join(
        [
            "from segattn.scheduler.testing import Subject, run_events",
            "",
            "",
            "def test_the_scheduler_keeps_its_rules():",
            f"    # {printable(finding.message)[:90]}",
            f"    subject = Subject.load({subject.name!r}, kind={subject.kind!r})",
            *_assigned("config", finding.config),
            *_assigned("policy", finding.policy),
            *_assigned("events", inputs(finding.events)),
            f"    run_events(subject, config, events, policy=policy, rules={finding.rules!r})",
        ]
    )


def _assigned(name: str, value: object) -> list[str]:
    first, *rest = pprint.pformat(value, width=80, sort_dicts=False).splitlines()
    return [f"    {name} = {first}", *(" " * (len(name) + 7) + line for line in rest)]
