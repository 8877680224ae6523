"""The decoder's arithmetic against independent formulas, and the plain forward pass."""

import ml_dtypes
import numpy as np
import pytest

from segattn.runner.llama import Llama, apply_rope, rms_norm, rope_tables, silu
from segattn.runner.plain_forward import (
    Comparison,
    compare_with_plain,
    dense_causal_attention,
    plain_logits,
)
from segattn.tests.runner.random_model import CONFIG, random_model, random_weights

RNG = np.random.default_rng(3)


def test_interleaved_rope_turns_each_pair_as_a_complex_number() -> None:
    x = RNG.normal(size=(2, 5, 8)).astype(np.float32)
    cos, sin = rope_tables(8, 5, 100.0)
    turned = apply_rope(x, cos, sin, "interleaved")
    for position in range(5):
        for pair in range(4):
            z = x[:, position, 2 * pair] + 1j * x[:, position, 2 * pair + 1]
            z = z * np.exp(1j * position * 100.0 ** (-2 * pair / 8))
            expected = np.stack([z.real, z.imag], axis=-1)
            np.testing.assert_allclose(
                turned[:, position, 2 * pair : 2 * pair + 2], expected, atol=1e-6
            )


def test_half_split_rope_pairs_the_two_halves() -> None:
    x = RNG.normal(size=(2, 5, 8)).astype(np.float32)
    cos, sin = rope_tables(8, 5, 100.0)
    interleave = np.arange(8).reshape(2, 4).T.ravel()
    expected = np.empty_like(x)
    expected[..., interleave] = apply_rope(x[..., interleave], cos, sin, "interleaved")
    np.testing.assert_array_equal(apply_rope(x, cos, sin, "half_split"), expected)


def test_rope_at_a_far_position_keeps_float64_angles() -> None:
    cos, _ = rope_tables(64, 8192, 100000.0)
    assert cos[8191, 0] == np.float32(np.cos(8191.0))


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x = np.array([[3.0, 4.0]], dtype=np.float32)
    # mean of squares is 12.5
    expected = [[3 / 12.5**0.5 * 2, 4 / 12.5**0.5 * 3]]
    normed = rms_norm(x, np.array([2.0, 3.0], dtype=np.float32), 0.0)
    np.testing.assert_allclose(normed, expected, rtol=1e-6)


def test_silu_is_finite_for_large_inputs() -> None:
    x = np.array([-200.0, -1.0, 0.0, 1.0, 200.0], dtype=np.float32)
    expected = [0.0, -1 / (1 + np.e), 0.0, 1 / (1 + np.exp(-1)), 200.0]
    np.testing.assert_allclose(silu(x), expected, rtol=1e-6)


def test_dense_attention_equals_a_loop_over_rows_and_heads() -> None:
    q, k, v = (RNG.normal(size=(heads, 6, 8)).astype(np.float32) for heads in (4, 2, 2))
    expected = np.empty((4, 6, 8))
    for head in range(4):
        for row in range(6):
            scores = k[head // 2, : row + 1].astype(float) @ q[head, row] / 8**0.5
            weights = np.exp(scores) / np.exp(scores).sum()
            expected[head, row] = weights @ v[head // 2, : row + 1]
    np.testing.assert_allclose(dense_causal_attention(0, q, k, v), expected, atol=1e-6)


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model = random_model()
    long = plain_logits(model, [5, 9, 2, 77])
    np.testing.assert_allclose(long[:3], plain_logits(model, [5, 9, 2]), atol=1e-4)


def test_first_selects_the_tail_of_the_logits() -> None:
    model = random_model()
    whole = plain_logits(model, [5, 9, 2, 77])
    np.testing.assert_allclose(plain_logits(model, [5, 9, 2, 77], first=2), whole[2:], atol=1e-4)


def test_comparison_reports_the_difference_margin_and_agreement() -> None:
    model = random_model()
    prompt = [5, 9, 2]
    plain = plain_logits(model, prompt)[-1]
    token = int(plain.argmax())
    served = plain.copy()
    served[3] += 0.25
    same = compare_with_plain(model, prompt, [token], [served])
    assert same.max_logit_difference == pytest.approx(0.25, abs=1e-4)
    ordered = np.sort(plain)
    assert same.min_top2_margin == pytest.approx(float(ordered[-1] - ordered[-2]), abs=1e-4)
    assert same.tokens_agree
    other = compare_with_plain(model, prompt, [(token + 1) % CONFIG.vocab_size], [served])
    assert not other.tokens_agree
    both = same | other
    assert (both.num_tokens, both.tokens_agree) == (2, False)


def test_comparisons_add_up_to_the_worst_of_both() -> None:
    first, second = Comparison(1, 0.1, 0.5, True), Comparison(2, 0.3, 0.2, True)
    assert first | second == second | first == Comparison(3, 0.3, 0.2, True)


def test_bfloat16_rounds_weights_and_activations() -> None:
    exact, rounded = random_model(), random_model(dtype="bfloat16")
    weights = rounded.weights.layers[0].q_proj
    np.testing.assert_array_equal(weights, weights.astype(ml_dtypes.bfloat16).astype(np.float32))
    difference = np.abs(plain_logits(exact, [5, 9, 2]) - plain_logits(rounded, [5, 9, 2])).max()
    assert 0 < difference < 2


def test_rounding_copies_the_weights_and_keeps_tied_embeddings_tied() -> None:
    weights = random_weights(tied=True)
    before = weights.embedding.copy()
    rounded = Llama(CONFIG, weights, "bfloat16").weights
    assert rounded.lm_head is rounded.embedding
    np.testing.assert_array_equal(weights.embedding, before)


def test_an_unknown_dtype_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match="dtype='float8': must be one of float32, bfloat16"):
        random_model(dtype="float8")
