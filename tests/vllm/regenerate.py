"""Record the seeds of the recorded traces again on the vLLM that is installed.

`python -m segattn.tests.vllm.regenerate [FILE ...] [--out FOLDER]` plays the requests, aborts,
resets and pauses of each trace with the same simulated model on the real classes, says which traces
changed and where they first differ, and with --out writes what they are now. `--ablate` then puts
the text of each known change of vLLM's rules back and says which changed traces that alone
restores: what no rule restores is a change that nobody has described yet.
"""

import argparse
import inspect
import os
import sys
import textwrap
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

# Before vLLM is imported, as in conftest.py.
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import vllm
from vllm.v1.core.sched import scheduler as vllm_scheduler

from segattn.scheduler import NeuronPolicy
from segattn.scheduler.testing.replay import compare_events
from segattn.scheduler.testing.trace import EOS_OF_TRACES
from segattn.scheduler.testing.trace_file import read_traces, write_traces
from segattn.tests.vllm.recorder import Recorder

TRACES = Path(__file__).parents[1] / "data" / "traces"
CLOSED_LOOP = ("base", "async", "neuron", "neuron_async", "targeted")
"""Files whose seeds say it all: their configurations have no drafts and no options of a plugin."""
_MOST_EMPTY = 50


@dataclass(frozen=True)
class Rule:
    """A change of vLLM: `new` stands where `old` stood, in the source of a function."""

    name: str
    owner: Any
    function: str
    new: str
    old: str


RULES = (
    Rule(
        "stop before min_tokens (0.29)",
        vllm_scheduler,
        "check_stop",
        "    last_token_id = request.output_token_ids[-1]\n",
        "    if request.num_output_tokens < sampling_params.min_tokens:\n        return False\n"
        "    last_token_id = request.output_token_ids[-1]\n",
    ),
    Rule(
        "a reset reports its preemptions (0.25)",
        vllm_scheduler.Scheduler,
        "reset_prefix_cache",
        "self.prev_step_scheduled_req_ids.clear()",
        "self.prev_step_scheduled_req_ids.clear(); self.reset_preempted_req_ids = set()",
    ),
    Rule(
        "the cursor after a priority victim (0.28)",
        vllm_scheduler.Scheduler,
        "schedule",
        "if victim_index < req_index:",
        "if preempted_req in scheduled_running_reqs:",
    ),
    Rule(
        "a lone request has no threshold (0.31)",
        vllm_scheduler.Scheduler,
        "schedule",
        "if num_eligible_reqs > 1",
        "if True",
    ),
    Rule(
        "a request that preempts itself is passed (0.33)",
        vllm_scheduler.Scheduler,
        "schedule",
        "and request.status == RequestStatus.PREEMPTED",
        "and False",
    ),
)


@contextmanager
def undone(rules: Sequence[Rule]) -> Iterator[list[str]]:
    """Run vLLM with the old text of `rules`; yields the names of those that it does not have."""
    absent, before = [], []
    for rule in rules:
        function = getattr(rule.owner, rule.function)
        source = textwrap.dedent(_SOURCES.get(function) or inspect.getsource(function))
        if source.count(rule.new) != 1:
            absent.append(rule.name)
            continue
        changed = source.replace(rule.new, rule.old)
        scope: dict[str, Any] = {}
        exec(compile(changed, rule.name, "exec"), vars(vllm_scheduler), scope)
        before.append((rule.owner, rule.function, function))
        _SOURCES[scope[rule.function]] = changed
        setattr(rule.owner, rule.function, scope[rule.function])
    try:
        yield absent
    finally:
        for owner, name, function in reversed(before):
            setattr(owner, name, function)


_SOURCES: dict[Any, str] = {}
"""Text of functions that were changed already."""


def record(trace: Mapping[str, Any]) -> dict[str, Any]:
    """The trace as the installed vLLM makes it from the same seed."""
    kind = trace["kind"]
    policy = NeuronPolicy.documented() if kind.startswith("neuron") else None
    config = {name: value for name, value in trace["config"].items() if name != "depth"}
    recorder = Recorder(kind, config, policy)
    depth = 2 if kind.endswith("async") else 1
    steps: deque[int] = deque()
    for name, *given in trace["events"]:
        match name:
            case "add":
                recorder.add(**given[0])
            case "abort":
                recorder.abort(given[0])
            case "reset":
                recorder.reset(bool(given[0]))
            case "pause":
                recorder.pause(given[0])
            case "schedule":
                _launch(recorder, trace, steps)
            case "update" if recorder.in_flight:
                recorder.update()
    # Decisions that changed may take more steps than the trace has.
    for _ in range(_MOST_EMPTY):
        if not recorder.scheduler.has_requests() or len(recorder.events) == len(trace["events"]):
            break
        _launch(recorder, trace, steps)
        while len(recorder.in_flight) >= depth:
            recorder.update()
    return {**trace, "vllm": vllm.__version__.split("+")[0], "events": recorder.events}


def _launch(recorder: Recorder, trace: Mapping[str, Any], steps: deque[int]) -> None:
    output = recorder.schedule()
    sampled = []
    for name in output.num_scheduled_tokens:
        request = recorder.scheduler.requests[name]
        position = request.num_computed_tokens
        tokens = [] if request.is_prefill_chunk else [_token(name, position, trace["eos_mod"])]
        sampled.append([name, tokens])
    recorder.launch(output, sampled)


def _token(name: str, position: int, eos_mod: int) -> int:
    """The token at a position of a request: the model of the recorded traces."""
    number = crc32(f"{name}:{position}".encode())
    return EOS_OF_TRACES if eos_mod and number % eos_mod == 0 else 3 + (number >> 8) % 97


def difference(trace: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The trace as it is now, and where it first differs from `trace`."""
    try:
        now = record(trace)
    except Exception as error:  # whatever the installed release raises is what changed
        return dict(trace), f"{type(error).__name__}: {error}"
    found = compare_events(trace["events"], now["events"])
    return now, None if found is None else str(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Report all traces; 1 when one changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, help="folder for the traces as they are now")
    parser.add_argument("--ablate", action="store_true", help="put each known rule back, alone")
    options = parser.parse_args(arguments)
    files = options.files or [TRACES / f"{name}.jsonl.gz" for name in CLOSED_LOOP]
    changed: list[dict[str, Any]] = []
    total = 0
    for path in files:
        now = []
        for trace in read_traces(path):
            total += 1
            recorded, why = difference(trace)
            now.append(recorded)
            if why is not None:
                changed.append(trace)
                print(f"{path.name} {trace['id']}: {why}")
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            write_traces(options.out / path.name, iter(now))
    print(f"vLLM {vllm.__version__}: {total - len(changed)} of {total} traces are as recorded")
    if options.ablate:
        for name, count in ablations(changed or list(read_traces(files[0]))).items():
            print(f"{count:5} {'restored' if changed else 'changed'} by undoing: {name}")
    return int(bool(changed))


def ablations(traces: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """How many of `traces` each rule alone turns from as recorded to changed, or back."""
    counts: Counter[str] = Counter()
    before = [difference(trace)[1] is None for trace in traces]
    for rule in RULES:
        with undone([rule]) as absent:
            if absent:
                counts[f"{rule.name}, not in this release"] = 0
                continue
            after = [difference(trace)[1] is None for trace in traces]
        counts[rule.name] = sum(was != now for was, now in zip(before, after, strict=True))
    return counts


if __name__ == "__main__":
    sys.exit(main())
