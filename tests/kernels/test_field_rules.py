"""Our own kernels keep the rules from the field; decode of several batches all but one."""

import numpy as np
import pytest

from segattn.kernels import backend
from segattn.kernels.backend import nisa, nki, nl
from segattn.reference.nki import NkiValidationError
from segattn.tests.kernels.field_rules import CALLS, SKIPS, violations


@pytest.mark.parametrize("name", CALLS)
def test_our_kernels_violate_nothing(name: str) -> None:
    rules = {line.partition(":")[0] for line in violations(CALLS[name])}
    assert rules == ({"loop_skip"} if name == SKIPS else set())


@nki.jit
def half_written(x: nl.NkiTensor) -> nl.NkiTensor:
    """Breaks the rule partial_output."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out[0:2, :], src=x[0:2, :])
    return out


def test_a_kernel_that_breaks_a_rule_is_refused() -> None:
    with pytest.raises(NkiValidationError, match="partial_output"):
        backend.run(half_written, 1, np.ones((4, 8), np.float32))
