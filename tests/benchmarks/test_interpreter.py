"""The interpreter benchmark prints both ratios and its exit status follows the limits."""

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
    rng = interpreter.np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 3, 4)), *rng.standard_normal((2, 5, 4)))
    out = interpreter.numpy_attention(q, k, v)
    scores = k[:3] @ q[0, 0] / 2
    weights = interpreter.np.exp(scores) / interpreter.np.exp(scores).sum()
    interpreter.np.testing.assert_allclose(out[0, 0], weights @ v[:3], rtol=1e-6)
