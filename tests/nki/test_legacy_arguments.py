"""Arguments of earlier releases that kernels in the field still pass."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import nisa, run


def test_an_integer_dge_mode_is_its_member_and_deprecated() -> None:
    none: Any = 3

    def body(dst: Any, tile: Any) -> None:
        nisa.dma_copy(dst, tile, dge_mode=none)

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(run(body, x), x)
    with (
        nki.strict(deprecated="error"),
        pytest.raises(NkiValidationError, match=r"dge_mode 3 as an integer; use dge_mode\.none"),
    ):
        run(body, x)


def test_an_integer_that_no_dge_mode_has_is_refused() -> None:
    wrong: Any = 7
    with pytest.raises(NkiValidationError, match="dge_mode 7; allowed"):
        run(lambda dst, tile: nisa.dma_copy(dst, tile, dge_mode=wrong), np.ones((2, 4), np.float32))


def test_a_float_zero_clears_an_integer_tile_and_no_other_float_does() -> None:
    x = np.ones((2, 4), np.int32)
    np.testing.assert_array_equal(run(lambda dst, tile: nisa.memset(dst, 0.0), x), 0 * x)
    with pytest.raises(NkiValidationError, match=r"value 2\.0 for a tile of dtype int32"):
        run(lambda dst, tile: nisa.memset(dst, 2.0), x)
