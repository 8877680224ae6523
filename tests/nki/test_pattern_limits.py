"""What an access may step over, and where a slice may end."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, NkiWarning

nl: Any = nki.language
nisa: Any = nki.isa


def _fill(view: Any) -> None:
    @nki.jit
    def kernel() -> None:
        tile = nl.zeros((2, 65535), dtype=nl.int8, name="tile")
        nisa.memset(view(tile), 1)

    kernel()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, 0 : 2 * 32767 : 32767],
        lambda t: t.ap([[65535, 2], [-32768, 2], [1, 4]], offset=32768),
        lambda t: t[:, 0:65532].reshape((2, 2, 32766)),
        lambda t: t.ap([[65535, 2], [40000, 1], [1, 4]]),
    ],
)
def test_a_free_step_of_16_bits_passes(view: Any) -> None:
    _fill(view)


@pytest.mark.parametrize(
    ("view", "step"),
    [
        (lambda t: t[:, 0:65535:39000], 39000),
        (lambda t: t.ap([[65535, 2], [32768, 2], [1, 4]]), 32768),
        (lambda t: t.ap([[65535, 2], [-32769, 2], [1, 4]], offset=32769), -32769),
    ],
)
def test_a_larger_free_step_is_refused(view: Any, step: int) -> None:
    text = rf"dst 'tile' steps over {step} elements in a free dimension; allowed: -32768..32767"
    with pytest.raises(NkiValidationError, match=text):
        _fill(view)


@pytest.mark.parametrize(
    "key",
    [
        (slice(None), slice(60, 100)),
        (slice(None), slice(0, 65)),
        (slice(100, 200), slice(None)),
        (slice(None), slice(-65, 4)),
        (slice(None), slice(-66, -1)),
        (slice(None), slice(0, 99, 2)),
    ],
)
def test_a_slice_outside_its_dimension_is_refused_where_it_is_taken(key: Any) -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        return x[key].shape

    x = np.zeros((128, 64), np.float32)
    text = r"slice .* of dimension [01] of 'x', whose size is (64|128), would be clipped.*test_patt"
    with pytest.raises(NkiValidationError, match=text):
        kernel(x)
    with nki.strict(slice_bounds="off"):
        assert kernel(x) == x[key].shape
    with nki.strict(slice_bounds="warn"), pytest.warns(NkiWarning, match="would be clipped"):
        kernel(x)


def test_slices_inside_pass() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        return [x[a].shape for a in (slice(0, 128), slice(-128, None), slice(-1, 128), slice(3))]

    assert kernel(np.zeros((128, 4), np.float32)) == [(128, 4), (128, 4), (1, 4), (3, 4)]
