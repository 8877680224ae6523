"""Which features of a scheduler a run of events has exercised."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .subject import Subject

CONFIGURATIONS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "runs by priority": lambda fields: fields.get("policy") == "priority",
    "runs without prefix caching": lambda fields: not fields.get("enable_prefix_caching", True),
    "runs without chunked prefill": lambda fields: not fields.get("enable_chunked_prefill", True),
    "runs with a long-prefill threshold": lambda fields: bool(
        fields.get("long_prefill_token_threshold")
    ),
    "runs with a watermark": lambda fields: bool(fields.get("watermark")),
    "runs with drafts": lambda fields: bool(fields.get("num_speculative_tokens")),
    "runs with max_consecutive_prefills": lambda fields: "max_consecutive_prefills" in fields,
    "runs with reserved admission": lambda fields: fields.get("kv_admission") == "reserved",
}
"""Features of a whole run, told by the fields of its configuration and its Neuron policy."""

OPTIONS = {
    "requests with a salt": "salt",
    "requests that skip the cache": "skip_read",
    "requests with min_tokens": "min_tokens",
    "requests with stop tokens": "stop",
}
"""Features of a request, told by a field of its "add" event."""

FEATURES = (
    *CONFIGURATIONS,
    *OPTIONS,
    "steps",
    "empty steps",
    "throttled steps",
    "failed steps",
    "new requests",
    "prefix hits",
    "prefill chunks",
    "preemptions",
    "resumes",
    "resumes that hit the cache",
    "refused requests",
    "aborts while waiting",
    "aborts while running",
    "aborts with a step in flight",
    "late deliveries",
    "cache resets",
    "cache resets refused",
    "cache resets that preempt",
    "pauses",
    "drafts scheduled",
    "drafts rejected",
    "padding tokens",
    "finished: stop",
    "finished: length",
)


def features_of(subject: Subject, *, is_literal: bool, with_model: bool) -> tuple[str, ...]:
    """Features that a scheduler can show; Neuron kinds preempt under the published designs only."""
    absent = set() if subject.depth > 1 else {"late deliveries"}
    absent |= set() if subject.is_neuron else {"padding tokens"}
    absent |= {"preemptions"} if subject.is_neuron and not is_literal else set()
    if not subject.is_neuron or not subject.takes_policy or is_literal:
        absent |= {"runs with max_consecutive_prefills", "runs with reserved admission"}
    if with_model or not subject.takes_throttle:
        absent.add("throttled steps")
    if with_model or not subject.takes_failures:
        absent.add("failed steps")
    return tuple(name for name in FEATURES if name not in absent)


class Coverage:
    """Counts of features, fed with observed events."""

    def __init__(self, features: Sequence[str] = FEATURES) -> None:
        self.features = features
        self.counts: Counter[str] = Counter()
        self._running: list[str] = []
        self._drafts: dict[int, dict[str, int]] = {}
        self._prompts: dict[str, int] = {}
        self._padding = 0

    def missing(self) -> list[str]:
        """Features that no event has exercised."""
        return [name for name in self.features if not self.counts[name]]

    def start_run(self, config: Mapping[str, Any], policy: Mapping[str, Any]) -> None:
        """Count a configuration; forget the scheduler of the previous run."""
        fields = {**config, **policy}
        for name, has in CONFIGURATIONS.items():
            self.counts[name] += has(fields)
        self._running, self._drafts, self._prompts, self._padding = [], {}, {}, 0

    def see(self, event: list[Any]) -> None:
        """Count what this event exercised."""
        kind = event[0]
        if kind == "add":
            self.counts["refused requests"] += len(event) > 2
            self._prompts[event[1]["id"]] = len(event[1]["prompt"])
            for name, option in OPTIONS.items():
                self.counts[name] += option in event[1]
        elif kind == "abort":
            self._see_abort(event[2])
        elif kind == "reset":
            name = "cache resets that preempt" if event[1] else "cache resets"
            self.counts[name if event[2] else "cache resets refused"] += 1
        elif kind == "pause":
            self.counts["pauses"] += event[1] > 0
        elif kind == "schedule" and "error" not in event[2]:
            self._see_step(event[1], event[2])
        elif kind == "fail":
            self.counts["failed steps"] += bool(event[2]["total"])
            self._running = list(event[2]["running"])
        elif kind == "update":
            self._see_update(event[1], event[2], event[3])

    def _see_abort(self, ids: list[str]) -> None:
        for name in ids:
            running = name in self._running
            self.counts["aborts while running" if running else "aborts while waiting"] += 1
            self.counts["aborts with a step in flight"] += bool(running and self._drafts)

    def _see_step(self, step: int, seen: Mapping[str, Any]) -> None:
        counts, tokens = self.counts, dict(seen["nst"])
        resumed = [entry for entry in seen["cached"] if entry[4]]
        started = [(name, hit) for name, hit, _ in seen["new"]]
        started += [(entry[0], entry[1]) for entry in seen["cached"]]
        counts["steps"] += 1
        counts["empty steps"] += not tokens
        counts["throttled steps"] += "throttle" in seen
        counts["new requests"] += len(seen["new"])
        counts["prefix hits"] += sum(hit > 0 for _, hit, _ in seen["new"])
        counts["preemptions"] += len(seen["pre"])
        counts["resumes"] += len(resumed)
        counts["resumes that hit the cache"] += sum(entry[1] > 0 for entry in resumed)
        counts["prefill chunks"] += sum(
            computed + tokens[name] < self._prompts[name] for name, computed in started
        )
        counts["padding tokens"] += seen.get("padtot", 0) - self._padding
        self._padding = seen.get("padtot", 0)
        drafts = {name: len(values) for name, values in seen.get("spec", [])}
        counts["drafts scheduled"] += sum(drafts.values())
        self._drafts[step] = drafts
        self._running = list(seen["running"])

    def _see_update(self, step: int, sampled: list[list[Any]], seen: Mapping[str, Any]) -> None:
        drafts = self._drafts.pop(step)
        self.counts["late deliveries"] += bool(self._drafts)
        for name, values in sampled:
            if values and name in drafts:
                self.counts["drafts rejected"] += drafts[name] - (len(values) - 1)
        for _, _, reason, _ in seen["outs"]:
            if reason in ("stop", "length"):
                self.counts[f"finished: {reason}"] += 1
        self._running = list(seen["running"])
