"""The fuzzer notices a fault in each thing that scheduler and model decide."""

from collections.abc import Callable
from typing import Any

import pytest

from segattn.reference.scheduler_state import State
from segattn.scheduler import (
    AsyncScheduler,
    NeuronScheduler,
    Request,
    Scheduler,
    SchedulerOutput,
    neuron_scheduler,
    prefix_digests,
)
from segattn.scheduler.holdback import Holdback
from segattn.scheduler.kv_cache_manager import KVCacheManager
from segattn.scheduler.neuron import NeuronRules
from segattn.scheduler.step import Step
from segattn.scheduler.testing import KINDS, RULES, Subject
from segattn.scheduler.testing.fuzzing import campaign_until
from segattn.scheduler.testing.machine import Campaign

GET_COMPUTED_BLOCKS = KVCacheManager.get_computed_blocks
BLOCK_DIGESTS, MAKE_OUTPUT = prefix_digests.block_digests, Step.make_output


def nothing(*_: object) -> None:
    """Replaces what the rule needs."""


def always(*_: object) -> bool:
    return True


def no_drafts(*_: object) -> list[int]:
    return []


def one_hit_less(self: KVCacheManager, request: Request) -> list[int]:
    return GET_COMPUTED_BLOCKS(self, request)[:-1]


FAULTS: list[tuple[str, str, Any, str, Any]] = [
    ("preemption", "base", Scheduler, "preempt", nothing),
    ("prefix hits", "base", KVCacheManager, "get_computed_blocks", one_hit_less),
    ("pauses", "base", Scheduler, "set_pause_state", nothing),
    ("resets", "base", KVCacheManager, "reset_prefix_cache", always),
    ("blocks of ended requests", "base", KVCacheManager, "free", nothing),
    ("padding of new decodes", "base", Scheduler, "pads_new_decodes", False),
    ("placeholders", "async", AsyncScheduler, "is_async", False),
    ("drafts near the end", "neuron_async", NeuronScheduler, "drafts_after", no_drafts),
    ("phases", "neuron", NeuronRules, "_separate_phases", nothing),
    ("room in the KV cache", "neuron", neuron_scheduler._Answers, "has_room", always),
    ("turns of decodes", "neuron", NeuronRules, "_some_decode_can_run", always),
    ("padded counts", "neuron", "segattn.scheduler.phases", "smallest_bucket", max),
    ("hidden requests", "neuron_async", Holdback, "restore", nothing),
]


@pytest.mark.parametrize(("kind", "owner", "name", "fault"), [fault[1:] for fault in FAULTS])
def test_the_fuzzer_notices_a_fault(
    monkeypatch: pytest.MonkeyPatch, kind: str, owner: Any, name: str, fault: Callable[..., Any]
) -> None:
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", lambda count, buckets: fault(buckets))
    else:
        monkeypatch.setattr(owner, name, fault)
    campaign = Campaign(Subject.own(kind), "model")
    rounds = (campaign_until(campaign, 0.0, number) for number in range(12))
    assert any(failed is not None for failed in rounds)
    assert campaign.failure is not None


def digests_of_any_tokens(parent: bytes, packed: bytes, block_size: int) -> list[bytes]:
    return BLOCK_DIGESTS(parent, bytes(len(packed)), block_size)


def content_of_any_tokens(state: State, row: int, num_tokens: int) -> bytes:
    return bytes([int(state.requests["salt"][row])]) + bytes(num_tokens)


def tokens_in_reverse(self: Step, *more: Any) -> SchedulerOutput:
    output = MAKE_OUTPUT(self, *more)
    told = output.scheduled_cached_reqs.all_token_ids
    told |= {name: tokens[::-1] for name, tokens in told.items()}
    return output


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("kind", ["neuron", "neuron_async"])
def test_wrong_content_is_noticed_where_all_decisions_agree(
    monkeypatch: pytest.MonkeyPatch, kind: str, rules: str
) -> None:
    # Scheduler and model take prompts of one length for the same, so their decisions are equal.
    for module in ("kv_cache_manager", "integrity"):
        monkeypatch.setattr(f"segattn.scheduler.{module}.block_digests", digests_of_any_tokens)
    monkeypatch.setattr("segattn.reference.scheduler_blocks.prefix_content", content_of_any_tokens)
    found = _failure(kind, rules, {"num_speculative_tokens": 0})
    assert "computed" in found
    assert "reads token" in found or "was not computed for it" in found


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_told_wrongly_are_noticed(
    monkeypatch: pytest.MonkeyPatch, kind: str, rules: str
) -> None:
    monkeypatch.setattr(Step, "make_output", tokens_in_reverse)
    assert "told tokens" in _failure(kind, rules, {})


def _failure(kind: str, rules: str, config: dict[str, Any]) -> str:
    campaign = Campaign(Subject.own(kind), rules, config)
    for number in range(12):
        campaign_until(campaign, 0.0, number)
        if campaign.failure is not None:
            return campaign.failure.message
    raise AssertionError("nothing was noticed")
