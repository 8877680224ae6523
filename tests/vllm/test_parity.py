"""Every decision of ours equals that of the real vLLM 0.33.0 scheduler on the same workload."""

import os
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import vllm
from hypothesis import HealthCheck, given, settings
from vllm.v1.outputs import DraftTokenIds as RealDraftTokenIds

from segattn.benchmarks.scheduler.vllm_reference import make_real_request
from segattn.scheduler import DraftTokenIds, NeuronPolicy, SchedulerConfig
from segattn.scheduler.testing.replay import replay
from segattn.scheduler.testing.trace import CONFIG_DEFAULTS, make_request, make_scheduler
from segattn.tests.vllm.recorder import NegativeCountError, Recorder
from segattn.tests.vllm.workload import Workload, play, workloads

POLICIES = {
    "none": None,
    "documented": NeuronPolicy.documented(),
    "default": NeuronPolicy(),
    "shipped": NeuronPolicy.shipped(),
    "reserved": NeuronPolicy(kv_admission="reserved", max_consecutive_prefills=2),
}
CASES = [
    ("base", "none"),
    ("async", "none"),
    ("neuron", "documented"),
    ("neuron_async", "documented"),
    ("neuron", "default"),
    ("neuron_async", "default"),
    ("neuron", "reserved"),
    ("neuron_async", "shipped"),
]
EXAMPLES = int(os.environ.get("SEGATTN_PARITY_EXAMPLES", "150"))


def test_the_vllm_of_this_environment_is_the_release_to_compare_with() -> None:
    assert vllm.__version__.split("+")[0] == "0.33.0"


@pytest.mark.parametrize(("kind", "policy"), CASES)
def test_every_decision_equals_that_of_vllm(kind: str, policy: str) -> None:
    reached: Counter[str] = Counter()
    is_base = not kind.startswith("neuron")

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(workload=workloads(is_base))
    def compare(workload: Workload) -> None:
        recorder = Recorder(kind, workload.config, POLICIES[policy])
        with suppress(NegativeCountError):
            play(recorder, workload, 2 if kind.endswith("async") else 1, max_final_steps=60)
        difference = replay(recorder.trace)
        assert difference is None, (difference, recorder.trace)
        reached.update(_features(recorder.trace))

    compare()
    assert set(reached) == EVERY_FEATURE


def test_drafts_reach_a_step_in_flight_as_in_vllm() -> None:
    config = {"max_num_seqs": 4, "num_speculative_tokens": 3, "block_size": 4}
    given = {"a": [], "b": [5], "c": [5, 6, 7, 8, 9], "gone": [5]}
    outputs = []
    for scheduler, drafts in (
        (Recorder("async", config).scheduler, RealDraftTokenIds),
        (make_scheduler("async", config), DraftTokenIds),
    ):
        is_real = drafts is RealDraftTokenIds
        for name in "abcd":
            fields = {"id": name, "prompt": [3, 4, 5], "max_tokens": 9}
            scheduler.add_request(
                make_real_request(fields, SchedulerConfig(**{**CONFIG_DEFAULTS, **config}))
                if is_real
                else make_request(fields)
            )
        scheduler.schedule()
        output = scheduler.schedule()
        tokens = [list(tokens) for tokens in given.values()]
        scheduler.update_draft_token_ids_in_output(drafts(list(given), tokens), output)
        outputs.append((output.scheduled_spec_decode_tokens, output.num_invalid_spec_tokens))
    assert outputs[0] == outputs[1]
    assert outputs[0][1] == {"a": 3, "b": 2}


EVERY_FEATURE = {
    "abort",
    "chunk",
    "drafts",
    "pause",
    "preempted",
    "prefix hit",
    "reset",
    "resumed",
    "several at once",
}


def _features(trace: dict[str, Any]) -> set[str]:
    """What a workload really made the scheduler do."""
    reached = {name for name, *_ in trace["events"]} & {"reset", "pause"}
    lengths = {one[1]["id"]: len(one[1]["prompt"]) for one in trace["events"] if one[0] == "add"}
    for name, *rest in trace["events"]:
        if name == "abort" and rest[1]:
            reached.add("abort")
        if name != "schedule":
            continue
        step = rest[1]
        marks = {
            "preempted": step["pre"],
            "drafts": step.get("spec"),
            "prefix hit": [new for new in step["new"] if new[1]],
            "chunk": [new for new in step["new"] if dict(step["nst"])[new[0]] < lengths[new[0]]],
            "resumed": [cached for cached in step["cached"] if cached[4]],
            "several at once": len(step["nst"]) > 1,
        }
        reached |= {mark for mark, seen in marks.items() if seen}
    return reached
