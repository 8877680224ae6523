"""The fuzzer notices a fault in each thing that scheduler and model decide."""

from collections.abc import Callable
from typing import Any

import pytest

from segattn.benchmarks.fuzz import command as fuzz
from segattn.benchmarks.fuzz.machine import machine
from segattn.benchmarks.fuzz.strategies import default_policies
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
    machine_class = machine(kind, default_policies())
    rounds = (fuzz.fuzz(machine_class, 0.0, number) for number in range(4))
    assert any(failed is not None for failed in rounds)
    assert machine_class.failure is not None
