"""vLLM 0.32's whole engine on the CPU, with its own scheduler and with the Neuron rules over it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm

from segattn.tests.vllm import tiny_model

PLUGIN = "segattn.scheduler.vllm_plugin"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny_llama")
    tiny_model.write_model(folder)
    return folder


def _generate(model: Path, scheduler_cls: str, loop: str) -> dict[str, Any]:
    """Run an engine in a process of its own: it takes global state for itself."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [sys.executable, tiny_model.__file__, str(model), scheduler_cls, loop]
    run = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=False
    )
    outcomes = [line for line in run.stdout.splitlines() if line.startswith("OUTCOME ")]
    assert run.returncode == 0, run.stderr[-4000:]
    outcome: dict[str, Any] = json.loads(outcomes[0].removeprefix("OUTCOME "))
    return outcome


@pytest.fixture(scope="module")
def tokens_of_vllm(model: Path) -> list[list[int]]:
    outcome = _generate(model, "default", "sync")
    assert outcome["scheduler"] == "vllm.v1.core.sched.scheduler.Scheduler"
    # The pool is small enough for vLLM to preempt, and it mixes prefills with decodes.
    assert sum(step["preempted"] for step in outcome["steps"]) > 0
    assert any(step["prefills"] and step["decodes"] for step in outcome["steps"])
    tokens: list[list[int]] = outcome["tokens"]
    return tokens


def test_the_vllm_of_this_environment_is_the_release_with_a_cpu_engine() -> None:
    assert vllm.__version__.split("+")[0] == "0.32.0"


@pytest.mark.parametrize(
    ("scheduler", "loop"), [("NeuronScheduler", "sync"), ("NeuronAsyncScheduler", "async")]
)
def test_the_engine_samples_the_same_tokens_under_the_neuron_rules(
    model: Path, tokens_of_vllm: list[list[int]], scheduler: str, loop: str
) -> None:
    outcome = _generate(model, f"{PLUGIN}.{scheduler}", loop)
    assert outcome["scheduler"] == f"{PLUGIN}.{scheduler}"
    assert outcome["loop"] == loop
    assert outcome["tokens"] == tokens_of_vllm
    assert [len(tokens) for tokens in outcome["tokens"]] == (
        [tiny_model.MAX_TOKENS] * len(tiny_model.PROMPT_LENGTHS)
    )
    steps = outcome["steps"]
    assert all(not (step["prefills"] and step["decodes"]) for step in steps)
    assert all(step["prefills"] <= 1 and step["preempted"] == 0 for step in steps)
    # The prompts of 200, 150, 128 and 100 tokens take 4 + 3 + 2 + 2 chunks of 64, the others one.
    assert sum(step["prefills"] for step in steps) == 11 + 5
