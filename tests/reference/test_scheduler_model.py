"""The scheduling model decides what real vLLM 0.33.0 decided, and what hand arithmetic says."""

import gzip
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from segattn.reference.scheduler import NewRequest, Pause, Rules, SchedulingModel, Status
from segattn.reference.scheduler_state import NeuronRules
from segattn.reference.scheduler_trace import (
    UNKNOWN_OPTIONS,
    ModelTrace,
    replay_model,
    rules_of_trace,
)
from segattn.scheduler import SchedulerConfig

TRACES = Path(__file__).parents[1] / "data" / "traces"
COUNTS = {
    "base": 240,
    "async": 140,
    "neuron": 200,
    "neuron_async": 80,
    "targeted": 15,
    "new_rules": 25,
}
WITHOUT_OPTIONS = (
    "lone_request", "min_tokens", "priority_self", "priority_victim", "reset_reported",
    "spec_padding", "stale_dropped", "stale_output", "victim_cursor",
)  # fmt: skip
"""New rules of 0.33 that no option switches on: the model has none of the options."""


def load(name: str) -> list[dict[str, Any]]:
    with gzip.open(TRACES / f"{name}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", COUNTS)
def test_the_model_reproduces_every_recorded_trace(name: str) -> None:
    traces = load(name)
    if name == "new_rules":
        traces = [trace for trace in traces if trace["id"].split("-")[1] in WITHOUT_OPTIONS]
    assert len(traces) == COUNTS[name]
    for trace in traces:
        events = replay_model(trace, NeuronRules.documented())
        for index, (ours, recorded) in enumerate(zip(events, trace["events"], strict=True)):
            assert recorded_part(ours, recorded) == recorded, f"{trace['id']} event {index}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("long_prefill_token_threshold_adaptive", True),
        ("max_num_active_seqs", 2),
        ("prefill_schedule_interval", 3),
        ("num_speculative_tokens_per_batch_size", [[1, 4, 2]]),
        ("max_num_new_slots_for_drafting", 1),
        ("can_skip_drafts", True),
        ("requires_kv_delivery", True),
        ("repair_vllm_faults", True),
    ],
)
def test_an_option_that_the_model_does_not_have_is_refused(name: str, value: object) -> None:
    off = asdict(SchedulerConfig(4, 16, 64, 4, 65))
    rules_of_trace("base", off, None)
    with pytest.raises(ValueError, match=f"{name}=.*the model has no rules for it"):
        rules_of_trace("base", off | {name: value}, None)


def test_every_option_is_known_to_the_model_or_refused() -> None:
    known = {item.name for item in fields(Rules)} | UNKNOWN_OPTIONS.keys()
    # Sizes of decode graphs decide nothing; the others follow from those that are given.
    undecided = {"num_seqs_buckets", "prefill_buckets", "decode_buckets"}
    assert {item.name for item in fields(SchedulerConfig)} - known == undecided


def recorded_part(ours: list[Any], recorded: list[Any]) -> list[Any]:
    """An event with the fields that were recorded: some are noted only where they occur."""
    return [
        {name: part.get(name) for name in there}
        if isinstance(part, dict) and isinstance(there, dict)
        else part
        for part, there in zip(ours, recorded, strict=True)
    ]


def run(
    kind: str, config: dict[str, Any], neuron: NeuronRules, *adds: dict[str, Any]
) -> ModelTrace:
    trace = ModelTrace(rules_of_trace(kind, config, neuron))
    for add in adds:
        trace.apply(["add", add])
    return trace


def steps(trace: ModelTrace, count: int) -> list[dict[str, int]]:
    """Tokens per request of the next steps; every complete request samples token 7."""
    seen = []
    for number in range(count):
        observed = trace.apply(["schedule", number])[2]
        seen.append(dict(observed["nst"]))
        chunk = trace.model.state.requests["chunk"]
        rows = {name: trace.model.state.row_of(name) for name in seen[-1]}
        sampled = [[name, [] if chunk[row] else [7]] for name, row in rows.items()]
        trace.apply(["update", number, sampled])
    return seen


NULL_BLOCK_COUNTED = {  # 8 blocks of which 7 usable, and each request may grow to 4
    "max_num_seqs": 2,
    "max_num_batched_tokens": 128,
    "max_model_len": 128,
    "block_size": 32,
    "num_blocks": 8,
}
LONG_PROMPTS = [
    {"id": "a", "prompt": list(range(100)), "max_tokens": 2, "eos": None},
    {"id": "b", "prompt": list(range(100, 200)), "max_tokens": 2, "eos": None},
]


def test_the_documented_rules_deadlock_when_the_null_block_is_counted() -> None:
    trace = run("neuron", NULL_BLOCK_COUNTED, NeuronRules.documented(), *LONG_PROMPTS)
    assert steps(trace, 4) == [{"a": 100}, {}, {}, {}]


def test_the_default_rules_wait_until_the_usable_blocks_suffice() -> None:
    trace = run("neuron", NULL_BLOCK_COUNTED, NeuronRules(), *LONG_PROMPTS)
    assert steps(trace, 5) == [{"a": 100}, {"a": 1}, {"b": 100}, {"b": 1}, {}]


def test_a_decode_step_goes_through_after_the_allowed_number_of_prefills() -> None:
    config = {**NULL_BLOCK_COUNTED, "num_blocks": 64, "max_num_seqs": 8}
    prompts = [{"id": name, "prompt": [1] * 40, "max_tokens": 4, "eos": None} for name in "abcd"]
    trace = run("neuron", config, NeuronRules(max_consecutive_prefills=2), *prompts)
    expected = [{"a": 40}, {"b": 8}, {"a": 1, "b": 1}, {"c": 8}, {"d": 8}]
    assert steps(trace, 5) == expected  # block 0 of 32 tokens is a prefix hit for b, c, d


def test_reserved_admission_counts_each_request_for_what_it_can_need() -> None:
    config = {**NULL_BLOCK_COUNTED, "max_num_seqs": 8}
    adds = [{"id": name, "prompt": [ord(name)] * 20, "max_tokens": 2} for name in "abcd"]
    worst = run("neuron", config, NeuronRules(kv_admission="worst_case"), *adds)
    assert steps(worst, 2) == [{"a": 20}, {"a": 1}]
    reserved = run("neuron", config, NeuronRules(kv_admission="reserved"), *adds)
    assert steps(reserved, 3) == [{"a": 20}, {"b": 20}, {"c": 20}]


def test_a_resumed_request_recomputes_its_outputs_in_prefill_steps() -> None:
    config = {**NULL_BLOCK_COUNTED, "max_num_batched_tokens": 8, "block_size": 4, "num_blocks": 64}
    config["enable_prefix_caching"] = False
    add = {"id": "a", "prompt": [1] * 6, "max_tokens": 9, "eos": None}
    seen = {}
    for name, rules in {"known": NeuronRules(), "prompt": NeuronRules.documented()}.items():
        trace = run("neuron", config, rules, add)
        steps(trace, 4)  # 6 prompt tokens, 4 outputs
        assert trace.apply(["reset", 1])[2]
        first, second = (trace.apply(["schedule", 10 + n])[2] for n in range(2))
        seen[name] = [first["nst"], first["pad"], second["nst"], second["pad"]]
    chunks = [[["a", 8]], [["a", 8]], [["a", 2]]]
    assert seen == {"known": [*chunks, [["a", 8]]], "prompt": [*chunks, [["a", 2]]]}


def test_rejected_drafts_are_rolled_back() -> None:
    model = SchedulingModel(Rules(4, 32, 64, 4, 32, num_speculative_tokens=3))
    model.add_request(NewRequest("a", [1, 2, 3], max_tokens=20))
    model.update(model.schedule(), {"a": [10]})
    model.update_drafts({"a": [11, 12, 13]})
    decision = model.schedule()
    assert decision.num_tokens.tolist() == [4]
    assert decision.drafts[0].tolist() == [11, 12, 13]
    model.update(decision, {"a": [11, 50]})  # one draft accepted, two rejected
    assert model.state.tokens[0].tolist() == [1, 2, 3, 10, 11, 50]
    assert model.state.requests["computed"][0] == 5


def test_asynchronous_drafts_hold_placeholders_until_their_tokens_arrive() -> None:
    rules = Rules(4, 32, 64, 4, 32, num_speculative_tokens=2, async_scheduling=True)
    model = SchedulingModel(rules)
    model.add_request(NewRequest("a", [1, 2, 3], max_tokens=20))
    first, second = model.schedule(), model.schedule()
    assert second.num_tokens.tolist() == [3]  # the token in flight and two draft placeholders
    assert model.state.requests["placeholders"][0] == 4
    model.update(first, {"a": [10]})
    model.update(second, {"a": [11]})  # both drafts rejected
    assert model.state.requests["placeholders"][0] == 0
    assert model.state.requests["computed"][0] == 4


def test_the_model_refuses_what_can_never_be_served() -> None:
    rules = Rules(4, 32, 16, 4, 4, neuron=NeuronRules())  # 3 usable blocks, 12 positions
    model = SchedulingModel(rules)
    for request in (
        NewRequest("empty", [], 1),
        NewRequest("none", [1], 0),
        NewRequest("long", [1] * 16, 1),
        NewRequest("big", [1] * 11, 3),
    ):
        with pytest.raises(ValueError, match=r"prompt|block"):
            model.add_request(request)
    assert not model.has_requests()
    model.add_request(NewRequest("fits", [1] * 11, 2))
    with pytest.raises(ValueError, match="live"):
        model.add_request(NewRequest("fits", [1], 1))
    assert model.get_num_unfinished_requests() == 1


def test_pause_states_hide_requests_from_the_count() -> None:
    model = SchedulingModel(Rules(1, 32, 16, 4, 32))
    model.add_request(NewRequest("a", [1], 5))
    model.add_request(NewRequest("b", [2], 5))
    model.schedule()
    counts = {}
    for pause in Pause:
        model.set_pause_state(pause)
        counts[pause] = model.get_num_unfinished_requests()
    assert counts == {Pause.UNPAUSED: 2, Pause.PAUSED_NEW: 1, Pause.PAUSED_ALL: 0}
    assert model.finish_requests(["a", "zzz"], Status.FINISHED_ABORTED) == ["a"]
    assert model.has_requests()


def test_an_id_that_ends_twice_between_two_steps_is_reported_once() -> None:
    # finished_req_ids is a set in vLLM.
    model = SchedulingModel(Rules(2, 32, 16, 4, 32))
    for _ in range(2):
        model.add_request(NewRequest("a", [1], 5))
        model.finish_requests(["a"], Status.FINISHED_ABORTED)
    assert model.schedule().finished == ["a"]
    assert not model.has_requests()
