"""The interpreter benchmark prints its ratios and its exit status follows the limits."""

import numpy as np
import pytest

from segattn.benchmarks import interpreter
from segattn.cli import main


def test_every_ratio_is_printed_and_three_have_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "interpreter", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line.partition("  ")[0] for line in lines[:3]] == [
        "attention S=512 prior=2048 heads=4 bf16",
        "tensor_scalar, one operator",
        "tensor_scalar, two operators",
    ]
    assert [float(line.split()[-1]) for line in lines[:3]] == [4, 2, 2]
    assert len(lines) == 12
    assert all("." in line.split()[-1] for line in lines[3:]), "no limit, the ratio is last"


@pytest.mark.parametrize(
    ("attention", "one", "two", "status"),
    [(3.9, 1.9, 1.9, 0), (4.1, 1.0, 1.0, 1), (1.0, 2.1, 1.0, 1), (1.0, 1.0, 2.1, 1)],
)
def test_check_fails_above_a_limit(
    attention: float, one: float, two: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = [interpreter.Comparison("x", seconds, 1.0) for seconds in (one, two, 9.0)]
    monkeypatch.setattr(interpreter, "attention_ratio", lambda rounds: (attention, 1.0))
    monkeypatch.setattr(interpreter, "instruction_costs", lambda rounds: costs)
    assert main(["bench", "interpreter", "--check"]) == status
    assert (
        main(
            [
                "bench",
                "interpreter",
            ]
        )
        == 0
    )


def test_the_plain_attention_is_causal_attention() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((1, 3, 4), (5, 4), (5, 4)))
    out = interpreter.numpy_attention(q, k, v)
    scores = np.exp(k[:3] @ q[0, 0] / 2)
    np.testing.assert_allclose(out[0, 0], scores / scores.sum() @ v[:3], rtol=1e-6)
