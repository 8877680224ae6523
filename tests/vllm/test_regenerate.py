"""The command that records seeds again tells what changed, and which rule of vLLM changed it."""

from pathlib import Path

import pytest
import vllm

from segattn.scheduler.testing.trace_file import read_traces, write_traces
from segattn.tests.vllm.regenerate import RULES, TRACES, main, undone

pytestmark = pytest.mark.skipif(
    not vllm.__version__.startswith("0.33"), reason="the traces were recorded on 0.33"
)
SELF_PREEMPTION = RULES[-1]


def test_an_undescribed_change_of_vllm_is_reported_and_a_known_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "few.jsonl.gz"
    write_traces(path, iter([*read_traces(TRACES / "targeted.jsonl.gz")][:8]))
    assert main([str(path), "--out", str(tmp_path / "now")]) == 0
    assert "8 of 8 traces are as recorded" in capsys.readouterr().out
    # Not the bytes: the recorded files list the queues in another order.
    assert [*read_traces(tmp_path / "now" / path.name)] == [*read_traces(path)]
    with undone([SELF_PREEMPTION]) as absent:
        assert absent == []
        # These are the seeds that were searched for this rule of 0.33.
        assert main([str(path), "--ablate"]) == 1
    out = capsys.readouterr().out
    assert ", field " in out
    assert "8 of 8" not in out
