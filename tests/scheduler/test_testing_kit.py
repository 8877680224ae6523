"""The testing kit on schedulers from outside the package, right ones and ones with a fault."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from segattn.cli import main
from segattn.scheduler.testing import Subject, describe, fuzz, reproducer

SOURCE = """
from dataclasses import replace

from segattn.reference.paging import smallest_bucket
from segattn.scheduler import NeuronPolicy, NeuronScheduler, Scheduler


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


class Swallow(NeuronScheduler):
    def reset_prefix_cache(self, reset_running_requests=False):
        return True
"""

FAULTS = {
    "Leak": "InvariantError",
    "Lifo": "is admitted before",
    "Mixed": "a mixed step|more than one prefill",
    "Unbounded": "2 prefill steps in a row while decodes wait, at most 1",
    "Padding": "padded to",
    "Crash": "IndexError: no such row",
    "Swallow": "since the last reset|tokens computed",
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module outside the package, in the current folder."""
    (tmp_path / "own_scheduler.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_scheduler", raising=False)
    return "own_scheduler"


@pytest.mark.parametrize("bound", [None, 1, 2])
def test_right_schedulers_keep_all_rules(module: str, bound: int | None) -> None:
    policy = {} if bound is None else {"max_consecutive_prefills": bound}
    assert fuzz(Subject.load(f"{module}:Right", policy=policy), seconds=3) is None


def test_the_base_scheduler_keeps_its_rules() -> None:
    assert fuzz(Subject.load("segattn.scheduler:Scheduler", neuron=False), seconds=3) is None


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_shrunk_and_reproduced(
    module: str, name: str, tmp_path: Path
) -> None:
    subject = Subject.load(f"{module}:{name}", policy={"max_consecutive_prefills": 1})
    found = fuzz(subject, seconds=60)
    assert found is not None
    assert re.search(FAULTS[name], found.message)
    assert len(found.events) <= 12
    shown = describe(found)
    assert ("Traceback" in shown) == (name == "Crash"), "its own exception comes first"
    test = tmp_path / "test_pasted.py"
    test.write_text(reproducer(found))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    pasted = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert pasted.returncode == 1, pasted.stdout
    assert found.message.splitlines()[0][:60] in pasted.stdout
    repaired = test.read_text().replace(f":{name}", ":Right")
    test.write_text(repaired)
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0


def test_the_command_writes_a_failure_that_replay_runs_on_the_same_class(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"config": {"block_size": 4}, "neuron": True}))
    options = ["--minutes", "0", "--config", str(config), "--out", "failure.json"]
    assert main(["fuzz", "--scheduler", f"{module}:Right", *options]) == 0
    assert "no rule was broken" in capsys.readouterr().out
    assert not Path("failure.json").exists()
    assert main(["fuzz", "--scheduler", f"{module}:Padding", *options]) == 1
    printed = capsys.readouterr().out
    assert "def test_the_scheduler_keeps_its_rules" in printed
    assert json.loads(Path("failure.json").read_text())["config"]["block_size"] == 4
    assert main(["replay", "failure.json"]) == 1
    assert "own_scheduler:Padding: InvariantError" in capsys.readouterr().out


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
def test_a_name_that_is_no_class_is_one_line(
    module: str, name: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuzz", "--scheduler", name]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert len(captured.err.splitlines()) == 1
