"""Instructions whose destination overlaps an operand."""

from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, run

nl: Any = nki.language
nisa: Any = nki.isa
X = floats(8, 16)


def _in_tile(body: Any) -> Any:
    def whole(dst: Any, tile: Any) -> None:
        body(tile)
        nisa.tensor_copy(dst, tile)

    return whole


@pytest.mark.parametrize(
    "body",
    [
        lambda t: nisa.tensor_copy(t[:, 1:16], t[:, 0:15]),
        lambda t: nisa.tensor_copy(t[:, 0:15], t[:, 1:16]),
        lambda t: nisa.tensor_scalar(t[:, 0:8], t[:, 4:12], nl.add, 1.0),
        lambda t: nisa.tensor_tensor(t[:, 0:8], t[:, 0:8], t[:, 1:9], nl.add),
        lambda t: nisa.activation(t, nl.exp, t.ap([[16, 8], [-1, 16]], offset=15)),
        lambda t: nisa.tensor_copy(t.reshape((8, 4, 4)), t.reshape((8, 4, 4)).permute((0, 2, 1))),
        lambda t: nisa.dma_copy(t[1:8], t[0:7]),
    ],
)
def test_overlapping_parts_in_another_order_are_refused(body: Any) -> None:
    text = r"overlapping parts of 'tiles'.*test_operand_overlap.*\[rule operand_overlap\]"
    with pytest.raises(NkiValidationError, match=text):
        run(_in_tile(body), X)
    with nki.strict(operand_overlap="off"):
        run(_in_tile(body), X)


@pytest.mark.parametrize(
    "body",
    [
        lambda t: nisa.tensor_scalar(t, t, nl.add, 1.0),
        lambda t: nisa.tensor_scalar(t.reshape((8, 4, 4)), t, nl.add, 1.0),
        lambda t: nisa.tensor_scalar(t, t, nl.multiply, t[:, 0:1]),
        lambda t: nisa.tensor_copy(t[:, 8:16], t[:, 0:8]),
        lambda t: nisa.tensor_copy(t[:, 0:16:2], t[:, 1:16:2]),
        lambda t: nisa.tensor_tensor(t[:, 0:8], t[:, 0:8], t[:, 8:16], nl.add),
        lambda t: nisa.nc_stream_shuffle(t, t, [255] * 32),
        lambda t: nisa.dma_copy(t[4:8], t[0:4]),
        lambda t: nisa.tensor_reduce(t[:, 0:1], nl.add, t, 1),
    ],
)
def test_in_place_and_disjoint_parts_pass(body: Any) -> None:
    assert run(_in_tile(body), X).shape == X.shape


def test_an_hbm_tensor_is_not_shifted_by_one_dma() -> None:
    @nki.jit
    def kernel(x: Any) -> None:
        nisa.dma_copy(x[1:8], x[0:7])

    with pytest.raises(NkiValidationError, match="overlapping parts of 'x'"):
        kernel(X.copy())


def _hbm(x: Any) -> Any:
    copy = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    nisa.dma_copy(copy, x)
    return copy


def _at_a_run_time_offset(tile: Any, h: Any, at: Any, rows: Any) -> None:
    shifted = tile.ap([[32, 32], [1, 8]], scalar_offset=at, indirect_dim=1)
    nisa.dma_copy(shifted, tile[:, 0:8])


def _gathered_in_place(tile: Any, h: Any, at: Any, rows: Any) -> None:
    nisa.dma_copy(h[0:4], h.ap([[32, 4], [1, 32]], vector_offset=rows))


def _scattered_in_place(tile: Any, h: Any, at: Any, rows: Any) -> None:
    nisa.dma_copy(h.ap([[32, 4], [1, 32]], vector_offset=rows), h[0:4])


@pytest.mark.parametrize("body", [_at_a_run_time_offset, _gathered_in_place, _scattered_in_place])
@pytest.mark.parametrize("overlaps", [True, False])
def test_a_dma_at_run_time_addresses_overlaps_as_a_static_one(body: Any, overlaps: bool) -> None:
    """Offset 4 and swapped rows overlap what is read, offset 8 and the rows in order do not."""

    @nki.jit
    def kernel(x: Any, at: Any, index: Any) -> None:
        body(nl.load(x), _hbm(x), nl.load(at), nl.load(index))

    at = np.array([[4 if overlaps else 8]], np.int32)
    index = np.array([[1], [0], [2], [3]] if overlaps else [[0], [1], [2], [3]], np.int32)
    text = "overlapping parts of .* go through another tile"
    refused = pytest.raises(NkiValidationError, match=text)
    with nki.strict(hbm_scatter="off"), refused if overlaps else nullcontext():
        kernel(floats(32, 32), at, index)


def test_a_dma_transpose_in_place_is_refused() -> None:
    @nki.jit
    def kernel(x: Any) -> None:
        tile = nl.load(x)
        nisa.dma_transpose(tile, tile)

    with pytest.raises(NkiValidationError, match="dma_transpose: dst and an operand are overlapp"):
        kernel(floats(32, 32, dtype=ml_dtypes.bfloat16))
