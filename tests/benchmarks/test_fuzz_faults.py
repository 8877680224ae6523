"""The fuzzer notices a fault in each thing that scheduler and model decide."""

from collections.abc import Callable
from typing import Any

import pytest

from segattn.benchmarks.fuzz import command as fuzz
from segattn.benchmarks.fuzz.machine import machine
from segattn.benchmarks.fuzz.strategies import default_policies
from segattn.scheduler import AsyncScheduler, Request, Scheduler
from segattn.scheduler.kv_cache_manager import KVCacheManager
from segattn.scheduler.neuron import NeuronRules
from segattn.scheduler.step_update import StepUpdate

GET_COMPUTED_BLOCKS = KVCacheManager.get_computed_blocks


def nothing(*_: object) -> None:
    """Replaces what the rule needs."""


def always(*_: object) -> bool:
    return True


def first_running(self: Scheduler) -> Request:
    """The wrong victim."""
    return self.running.pop(0)


def one_hit_less(self: KVCacheManager, request: Request) -> list[int]:
    return GET_COMPUTED_BLOCKS(self, request)[:-1]


FAULTS: list[tuple[str, str, Any, str, Callable[..., Any]]] = [
    ("preemption", "base", Scheduler, "_pop_victim", first_running),
    ("prefix hits", "base", KVCacheManager, "get_computed_blocks", one_hit_less),
    ("pauses", "base", Scheduler, "set_pause_state", nothing),
    ("resets", "base", KVCacheManager, "reset_prefix_cache", always),
    ("blocks of ended requests", "base", KVCacheManager, "free", nothing),
    ("rejected drafts", "async", StepUpdate, "_reject_drafts", nothing),
    ("tokens in flight at a reset", "async", StepUpdate, "_discard_tokens", nothing),
    ("placeholders", "async", AsyncScheduler, "_advance", Scheduler._advance),
    ("phases", "neuron", NeuronRules, "_separate_phases", nothing),
    ("room in the KV cache", "neuron", NeuronRules, "_kv_cache_has_room", always),
    ("turns of decodes", "neuron", NeuronRules, "_some_decode_can_run", always),
    ("padded counts", "neuron", "segattn.scheduler.neuron", "smallest_bucket", max),
    ("hidden requests", "neuron_async", NeuronRules, "_restore", nothing),
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
