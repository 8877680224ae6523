"""The testing kit on schedulers from outside the package, right ones and ones with a fault."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from segattn.scheduler.testing import Subject, describe, fuzz, reproducer
from segattn.scheduler.testing.trace_file import read_traces
from segattn.tests.command import segattn

SOURCE = """
from dataclasses import replace

from segattn.reference.paging import smallest_bucket
from segattn.scheduler import NeuronPolicy, NeuronScheduler, RequestError, Scheduler


class Right(NeuronScheduler):
    pass


class Leak(NeuronScheduler):
    def __init__(self, config, policy):
        super().__init__(config, policy)
        manager, self.freed = self.kv_cache_manager, 0
        free = manager.free

        def forgetful(request):
            self.freed += 1
            if self.freed % 3:
                free(request)

        manager.free = forgetful


class Lifo(NeuronScheduler):
    added = ()

    def add_request(self, request):
        if request.request_id in {waiting.request_id for waiting in self.added}:
            raise RequestError(request.request_id, "lives")
        self.added = (request, *self.added)

    def finish_requests(self, ids, status):
        self.flush()
        return super().finish_requests(ids, status)

    def flush(self):
        for request in self.added:
            super().add_request(request)
        self.added = ()

    def schedule(self):
        self.flush()
        return super().schedule()


class Mixed(Scheduler):
    def schedule(self):
        output = super().schedule()
        buckets = self.config.prefill_buckets
        output.num_scheduled_tokens_padded = {
            name: count
            if self.requests[name].num_output_tokens
            else smallest_bucket(count, buckets)
            for name, count in output.num_scheduled_tokens.items()
        }
        return output


class Unbounded(NeuronScheduler):
    def __init__(self, config, policy):
        super().__init__(config, replace(policy, max_consecutive_prefills=1000))


class Padding(NeuronScheduler):
    def schedule(self):
        output = super().schedule()
        padded = output.num_scheduled_tokens_padded or {}
        output.num_scheduled_tokens_padded = {name: n + 1 for name, n in padded.items()}
        return output


class Crash(NeuronScheduler):
    def update_from_output(self, output, results):
        if len(output.num_scheduled_tokens) > 1:
            raise IndexError("no such row")
        return super().update_from_output(output, results)


class Starved(NeuronScheduler):
    def __init__(self, config, policy):
        super().__init__(config, replace(policy, max_consecutive_decodes=1000))


class Stubborn(NeuronScheduler):
    def add_request(self, request):
        if request.cache_salt:
            raise ValueError("no salt here")
        super().add_request(request)


class Careless(NeuronScheduler):
    def add_request(self, request):
        try:
            super().add_request(request)
        except ValueError:
            pass


class Silent(NeuronScheduler):
    def schedule(self):
        output = super().schedule()
        output.finished_req_ids = set()
        return output


class Hasty(NeuronScheduler):
    def schedule(self):
        output = super().schedule()
        cached = output.scheduled_cached_reqs
        cached.num_computed_tokens = [n + 1 for n in cached.num_computed_tokens]
        return output


class Shared(NeuronScheduler):
    def add_request(self, request):
        request.cache_salt = None
        super().add_request(request)


class Pushy(NeuronScheduler):
    def set_pause_state(self, state):
        pass


class Amnesic(NeuronScheduler):
    def step_failed(self, output, error):
        self.steps_in_flight.clear()


class Refuses(NeuronScheduler):
    def schedule(self):
        if len(self.running) > 1:
            raise ValueError("my own")
        return super().schedule()


class Swallow(NeuronScheduler):
    def reset_prefix_cache(self, reset_running_requests=False):
        return True
"""

FAULTS = {
    "Leak": "reset_prefix_cache refuses|a deadlock|do not end",
    "Lifo": "is admitted before",
    "Mixed": "a mixed step|more than one prefill",
    "Unbounded": "2 prefill steps in a row keep decodes waiting, at most 1",
    "Starved": "decode steps in a row keep a prefill waiting, at most 1",
    "Padding": "padded to",
    "Crash": "IndexError: no such row",
    "Swallow": "reset_prefix_cache succeeds although|the outputs are|since the last reset",
    "Stubborn": "is refused although it can be served",
    "Careless": "is taken although a request of this id lives",
    "Silent": "finished_req_ids=",
    "Hasty": "tokens, of which|tokens computed|drafts, of",
    "Shared": "where something else was computed",
    "Amnesic": "tokens computed|where something else was computed|finished_req_ids=|do not end",
    "Pushy": "although (admission|everything) is paused",
}
BOUNDS = {"max_consecutive_prefills": 1, "max_consecutive_decodes": 1}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module outside the package, in the current folder."""
    (tmp_path / "own_scheduler.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_scheduler", raising=False)
    return "own_scheduler"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_shrunk_and_reproduced(
    module: str, name: str, tmp_path: Path
) -> None:
    subject = Subject.load(f"{module}:{name}")
    found = fuzz(subject, seconds=60, policy=BOUNDS)
    assert found is not None
    assert re.search(FAULTS[name], found.message), found.message
    assert len(found.events) <= 30
    shown = describe(found)
    assert shown.startswith("Traceback") == (name == "Crash"), "its own exception comes first"
    assert all(len(line) <= 80 for line in shown[shown.index("configuration") :].splitlines())
    test = tmp_path / "test_pasted.py"
    test.write_text(reproducer(found))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    pasted = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert pasted.returncode == 1, pasted.stdout
    assert found.message[:60] in pasted.stdout
    repaired = test.read_text().replace(f":{name}", ":Right")
    test.write_text(repaired)
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0


def test_the_command_writes_a_failure_that_replay_runs_on_the_same_class(
    module: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"config": {"block_size": 4}, "kind": "neuron"}))
    options = ["--minutes", "0", "--config", config, "--out", "failure.jsonl.gz"]
    right = segattn("fuzz", "--scheduler", f"{module}:Right", *options)
    assert right.status == 0
    assert "no rule was broken in" in right.out
    assert not Path("failure.jsonl.gz").exists()
    failed = segattn("fuzz", "--scheduler", f"{module}:Padding", *options)
    assert failed.status == 1
    assert "def test_the_scheduler_keeps_its_rules" in failed.out
    (trace,) = read_traces(Path("failure.jsonl.gz"))
    assert trace["config"]["block_size"] == 4
    replayed = segattn("replay", "failure.jsonl.gz")
    assert replayed.status == 1
    assert "own_scheduler:Padding: InvariantError" in replayed.out
    Path("own_scheduler.py").write_text(SOURCE.replace("n + 1 for", "n for"))
    sys.modules.pop(module)
    assert segattn("replay", "failure.jsonl.gz").out == "1 passed, 0 failed\n"


def test_a_scheduler_can_be_compared_with_the_model_too(module: str) -> None:
    for name, message in (("Lifo", "DisagreementError"), ("Refuses", "ValueError: my own")):
        found = fuzz(Subject.load(f"{module}:{name}"), seconds=60, rules="model")
        assert found is not None
        shown = describe(found)
        assert message in shown
        assert shown.startswith("Traceback") == (name == "Refuses")
    assert fuzz(Subject.load(f"{module}:Right"), seconds=0, rules="model") is None


def test_explore_and_policies_take_a_scheduler_too(module: str) -> None:
    sizes = ("--requests", "2", "--max-model-len", "2")
    right = segattn("explore", "--scheduler", f"{module}:Right", *sizes)
    assert (right.status, "no rule is broken" in right.out) == (0, True), right
    lifo = segattn("explore", "--scheduler", f"{module}:Lifo", *sizes)
    assert lifo.status == 1
    assert "is admitted before" in lifo.out
    other = segattn("explore", "--scheduler", f"{module}:Mixed", *sizes)
    assert (other.status, other.err.count("\n")) == (2, 1)
    assert "must be derived from NeuronScheduler" in other.err
    table = segattn("policies", "--scheduler", f"{module}:Right", "--requests", "4")
    assert table.status == 0
    assert f"{module}:Right" in table.out


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("own_scheduler", "must be package.module:Class"),
        ("absent_module:Right", "No module named 'absent_module'"),
        ("own_scheduler:Absent", "has no 'Absent'"),
        ("own_scheduler:SOURCE", "has no 'SOURCE'"),
        ("own_scheduler:replace", "must be a class"),
    ],
)
def test_a_name_that_is_no_class_is_one_line(module: str, name: str, named: str) -> None:
    for command in ("fuzz", "explore", "policies"):
        result = segattn(command, "--scheduler", name)
        assert result.status == 2
        assert named in result.err
        assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("[]", "must be a JSON object"),
        ('{"rules": 1}', "has 'rules', must be one of ['kind', 'config', 'policy']"),
        ('{"config": 1}', "config is 1, must be a JSON object"),
        ('{"config": {"block": 1}}', "config has 'block', must be one of"),
        ('{"policy": {"design": "x"}}', "design='x': must be one of"),
        ('{"kind": "own"}', "kind='own': must be one of base"),
        ('{"config": {"block_size": 0}}', "block_size=0: must be an integer >= 1"),
    ],
)
def test_a_bad_config_file_is_one_line(tmp_path: Path, given: str, named: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(given)
    result = segattn("fuzz", "--config", path, "--minutes", "0", "--out", tmp_path / "f.gz")
    assert result.status == 2
    assert named in next(line for line in result.err.splitlines() if "error" in line)
