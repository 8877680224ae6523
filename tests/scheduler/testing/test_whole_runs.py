"""Runs that the kit must let pass, and failures that do not happen again."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.scheduler.testing import KINDS, Subject, run_events
from segattn.scheduler.testing.strategies import configs
from segattn.tests.command import segattn


def test_any_number_of_waiting_requests_is_served_to_the_end() -> None:
    # One at a time: 90 prefills and 90 * 9 decodes, more steps than a fixed limit of 500.
    config = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 8,
        "max_model_len": 16,
        "block_size": 4,
        "num_blocks": 9,
    }
    request = {"prompt": [5], "max_tokens": 10, "eos": None}
    events = [["add", request | {"id": f"r{n}", "arrival": float(n)}] for n in range(90)]
    seen = run_events(Subject.own("neuron"), config, events)
    finished = [out for event in seen if event[0] == "update" for out in event[-1]["outs"]]
    assert sum(out[2] == "length" for out in finished) == 90


def test_resumed_requests_that_decode_at_once_keep_no_later_prefill_waiting() -> None:
    # After the second reset r10 and r11 find all but one token cached, and r18 is behind them.
    config = {
        "max_num_seqs": 3,
        "max_num_batched_tokens": 14,
        "max_model_len": 8,
        "block_size": 3,
        "num_blocks": 11,
        "long_prefill_token_threshold": 4,
    }
    requests = [
        {"id": name, "prompt": prompt, "max_tokens": most, "arrival": arrival, "eos": None}
        for name, prompt, most, arrival in (
            ("r9", [5, 6, 5, 6, 5], 3, 2.0),
            ("r10", [5, 6], 3, 2.0),
            ("r11", [5, 6, 5], 2, 5.0),
            ("r18", [5], 1, 18.0),
        )
    ]
    steps = iter(range(20))

    def step(*sampled: tuple[str, list[int]]) -> list[list[Any]]:
        number = next(steps)
        return [["schedule", number], ["update", number, [list(one) for one in sampled]]]

    events = [
        *(["add", request] for request in requests[:3]),
        *step(("r9", [])),
        ["reset", 1],
        *step(("r9", [])),
        *step(("r9", [5])),
        *step(("r10", [5])),
        *step(("r9", [5]), ("r10", [5])),
        *step(("r11", [5])),
        ["add", requests[3]],
        ["reset", 1],
        *step(("r9", [])),
        *step(("r9", [5])),
        *step(("r10", [5])),
        *step(("r11", [5])),
    ]
    seen = run_events(Subject.own("neuron"), config, events)
    counts = [event[-1]["nst"] for event in seen if event[0] == "schedule"]
    assert [each for each in counts if each][-3:] == [[["r10", 1]], [["r11", 1]], [["r18", 1]]]


def test_a_block_may_be_shared_as_soon_as_the_tokens_of_a_step_in_flight_are_known() -> None:
    # Step 1 computes the token that step 0 sampled; in step 2 r1 finds its block.
    config = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "max_model_len": 13,
        "block_size": 1,
        "num_blocks": 31,
    }
    events: list[Any] = [
        ["add", {"id": "r0", "prompt": [5], "max_tokens": 3}],
        ["schedule", 0],
        ["schedule", 1],
        ["update", 0, [["r0", [5]]]],
        ["add", {"id": "r1", "prompt": [5, 5, 5], "max_tokens": 1}],
        ["schedule", 2],
    ]
    seen = run_events(Subject.own("async"), config, events)
    new = seen[5][2]["new"]
    assert new == [["r1", 2, [1, 2, 4]]]


@given(st.data(), st.sampled_from(KINDS))
def test_budgets_below_one_token_with_its_drafts_are_not_asked_to_serve_all(
    data: st.DataObject, kind: str
) -> None:
    # 0.33 pads the last token of a prompt to 1 + drafts, and starts no padded request in part.
    config = data.draw(configs(Subject.own(kind), {}, serves_all=True))
    row = 1 + config["num_speculative_tokens"]
    assert not config["enable_chunked_prefill"] or config["max_num_batched_tokens"] >= row
    assert config.get("max_num_scheduled_tokens", row) >= row


FLAKY = """
from segattn.scheduler import NeuronScheduler


class Flaky(NeuronScheduler):
    num_made = 0

    def __init__(self, config):
        super().__init__(config)
        Flaky.num_made += 1

    def schedule(self):
        if Flaky.num_made < 3:
            raise RuntimeError("only at first")
        return super().schedule()
"""


def test_a_failure_that_does_not_happen_again_is_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flaky_scheduler.py").write_text(FLAKY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "flaky_scheduler", raising=False)
    result = segattn("fuzz", "--scheduler", "flaky_scheduler:Flaky", "--minutes", "0")
    assert result.status == 1
    assert "RuntimeError: only at first" in result.out
    assert "does not fail when run again" in result.err
    assert Path("fuzz-failure.jsonl.gz").exists()
