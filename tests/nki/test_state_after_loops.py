"""Python state after a dynamic loop is what one run of its body leaves."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiWarning
from segattn.tests.nki.test_loops_traced_once import TRIPS, add

nl: Any = nki.language
nisa: Any = nki.isa


class _Slotted:
    __slots__ = ("count", "seen")

    def __init__(self) -> None:
        self.count = 0
        self.seen: dict[int, Any] = {}


class _Owner:
    trips = 0

    def __init__(self, tile: Any) -> None:
        self.state, self.tile = _Slotted(), tile

    def body(self, i: Any) -> None:
        _Owner.trips += 1
        self.state.count += 1
        self.state.seen[self.state.count] = i
        add(self.tile, 1.0)


@pytest.mark.parametrize("trips", [1, TRIPS])
def test_python_state_after_a_loop_is_what_one_run_of_the_body_leaves(trips: int) -> None:
    """NKI traces the body once: a list that it appends to has one element more on the device."""
    state: list[Any] = []

    @nki.jit
    def kernel(x: Any) -> Any:
        tile, count = nl.load(x), 0
        log: list[int] = []
        nested: dict[str, set[int]] = {"all": set()}
        owner = _Owner(nl.load(x))
        _Owner.trips = 0

        def body(i: Any) -> None:
            nonlocal count
            count += 1
            log.append(count)
            nested["all"].add(count)
            add(tile, 1.0)

        nl.fori_loop(0, trips, body)
        nl.fori_loop(0, trips, owner.body)
        state.append((count, log, nested, owner.state.count, len(owner.state.seen), _Owner.trips))
        add(tile, float(len(log)))
        nisa.tensor_tensor(tile, tile, owner.tile, nl.add)
        out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(out, tile)
        return out

    with nki.strict(purity="warn"), pytest.warns(NkiWarning, match="changes state, a list"):
        result = kernel(np.zeros((2, 4), np.float32))
    assert state == [(1, [1], {"all": {1}}, 1, 1, 1)]
    np.testing.assert_array_equal(result, np.full((2, 4), 2 * trips + 1))
