"""Random bits, seeds and dropout. The device's bit streams are not documented: only what is."""

from typing import Any

import numpy as np
import pytest

from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, nisa, nl, run

SEED = np.array([[12345]], np.uint32)


def seeded(dst: Any, seed: Any) -> None:
    nisa.set_rng_seed(seed)
    nisa.rng(dst)


def test_rng_fills_integer_tiles_with_bits_of_even_weight() -> None:
    bits = run(seeded, SEED, out=((128, 64), "uint32"))
    ones = np.unpackbits(bits.view(np.uint8)).mean()
    # 262144 fair bits: 0.5 with a standard deviation below 0.001.
    assert abs(ones - 0.5) < 0.005


def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    first = run(seeded, SEED, out=((4, 16), "uint16"))
    np.testing.assert_array_equal(first, run(seeded, SEED, out=((4, 16), "uint16")))
    assert (first != run(seeded, SEED + 1, out=((4, 16), "uint16"))).any()


def test_rng_refuses_float_tiles_and_gpsimd_in_psum() -> None:
    with pytest.raises(NkiValidationError, match="dtype float32"):
        run(seeded, SEED, out=((4, 4), "float32"))
    with pytest.raises(NkiValidationError, match="cannot access PSUM"):
        run(
            lambda dst, seed: nisa.rng(dst, nisa.engine.gpsimd),
            SEED,
            out=((4, 4), "uint32"),
            psum=True,
        )


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_dropout_of_probability_0_and_1_is_certain(dtype: Any) -> None:
    data = np.arange(1, 33).reshape(4, 8).astype(dtype)
    np.testing.assert_array_equal(run(lambda dst, d: nisa.dropout(dst, d, 0.0), data), data)
    np.testing.assert_array_equal(run(lambda dst, d: nisa.dropout(dst, d, 1.0), data), 0 * data)


def test_dropout_takes_one_probability_per_partition_and_keeps_values() -> None:
    data = np.ones((2, 4096), np.float32)
    prob = np.array([[0.25], [1.0]], np.float32)
    found = run(lambda dst, d, p: nisa.dropout(dst, d, p), data, prob)
    assert set(np.unique(found[0])) == {0.0, 1.0}
    assert abs((found[0] == 0).mean() - 0.25) < 0.04
    assert not found[1].any()


def test_dropout_refuses_other_dtypes_and_probabilities() -> None:
    for prob, out, message in ((1.5, None, "prob 1.5"), (0.5, ((2, 4), "bfloat16"), "same")):
        with pytest.raises(NkiValidationError, match=message):
            run(lambda dst, d, p=prob: nisa.dropout(dst, d, p), floats(2, 4), out=out)


def test_the_state_of_gpsimd_is_read_back_as_it_was_set() -> None:
    def body(dst: Any, state: Any) -> None:
        nisa.rand_set_state(state)
        nisa.rand_get_state(dst)

    state = np.arange(24, dtype=np.uint32).reshape(4, 6)
    np.testing.assert_array_equal(run(body, state), state)


def test_the_state_has_six_words_and_belongs_to_gpsimd() -> None:
    def no_state(dst: Any, state: Any) -> None:
        nisa.rand_get_state(dst)

    def on_vector(dst: Any, state: Any) -> None:
        nisa.rand_set_state(state, nisa.engine.vector)

    def narrow(dst: Any, state: Any) -> None:
        nisa.rand_set_state(state[:, 0:5])

    for body, message in (
        (no_state, "call rand_set_state"),
        (on_vector, "allowed on trn2: gpsimd"),
        (narrow, r"needed \[P, 6\]"),
    ):
        with pytest.raises(NkiValidationError, match=message):
            run(body, np.zeros((4, 6), np.uint32))


@pytest.mark.parametrize(
    "call",
    [
        lambda t: nisa.nc_matmul_mx(t, t, t, t, t),
        lambda t: nisa.quantize_mx(t, t, t),
        lambda t: nisa.activate2(t, nl.exp, t, 1.0, 0.0, nl.multiply, nl.add),
        lambda t: nisa.exponential(t, t),
        lambda t: nisa.rand2(t, 0.0, 1.0),
        lambda t: t.indirect(t),
        lambda t: nl.abs_max(t, t),
        lambda t: nl.abs_min(t, t),
        lambda t: nl.ndarray((1, 1), dtype=nl.float8_e5m2_x4),
        lambda t: nl.ndarray((1, 1), dtype=nl.float8_e4m3fn_x4),
        lambda t: nl.ndarray((1, 1), dtype=nl.float4_e2m1fn_x4),
    ],
)
def test_what_only_trn3_has_says_so(call: Any) -> None:
    with pytest.raises(NkiValidationError, match="trn3"):
        run(lambda dst, t: call(t), floats(2, 2))
