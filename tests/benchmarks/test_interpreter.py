"""The interpreter benchmark prints both ratios and its exit status follows the limits."""

import numpy as np
import pytest

from segattn.benchmarks import interpreter


def test_both_ratios_are_printed_with_their_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert interpreter.main(["--rounds", "1"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("attention S=512 prior=2048 heads=4 bf16: interpreter")
    assert first.endswith("(limit 4)")
    assert second.startswith("tensor_scalar [128, 512] fp32: interpreter")
    assert second.endswith("(limit 2)")


@pytest.mark.parametrize(("ours", "status"), [(3.9, 0), (4.1, 1)])
def test_check_fails_above_a_limit(
    ours: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "attention_ratio", lambda rounds: (ours, 1.0))
    monkeypatch.setattr(interpreter, "tensor_scalar_ratio", lambda rounds: (1.9, 1.0))
    assert interpreter.main(["--check"]) == status
    assert interpreter.main([]) == 0


def test_the_plain_attention_is_causal_attention() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in ((1, 3, 4), (5, 4), (5, 4)))
    out = interpreter.numpy_attention(q, k, v)
    scores = np.exp(k[:3] @ q[0, 0] / 2)
    np.testing.assert_allclose(out[0, 0], scores / scores.sum() @ v[:3], rtol=1e-6)
