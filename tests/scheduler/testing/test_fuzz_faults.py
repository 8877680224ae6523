"""The fuzzer notices a fault in each thing that scheduler and model decide."""

from collections.abc import Callable
from typing import Any

import pytest

from segattn.scheduler import (
    AsyncScheduler,
    NeuronScheduler,
    Request,
    Scheduler,
    neuron_scheduler,
)
from segattn.scheduler.holdback import Holdback
from segattn.scheduler.kv_cache_manager import KVCacheManager
from segattn.scheduler.neuron import NeuronRules
from segattn.scheduler.testing import Subject
from segattn.scheduler.testing.fuzzing import campaign_until
from segattn.scheduler.testing.machine import Campaign

GET_COMPUTED_BLOCKS = KVCacheManager.get_computed_blocks


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
