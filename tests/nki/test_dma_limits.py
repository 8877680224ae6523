"""What dma_copy, dma_transpose and dma_compute refuse, and dma_transpose's permutations."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError

# the tests pass wrong types on purpose
nl: Any = nki.language
nisa: Any = nki.isa
dge = nisa.dge_mode


def _on(body: Callable[..., Any], *arrays: Any) -> None:
    """Run `body(*hbm_tensors)` in a kernel."""

    @nki.jit
    def kernel(*tensors: Any) -> None:
        body(*tensors)

    kernel(*arrays)


def _tile(*shape: int, dtype: str = "float32") -> Any:
    return nl.zeros(shape, dtype=dtype)


X = np.arange(64, dtype=np.float32).reshape(8, 8)
INDEX = np.arange(8, dtype=np.int32).reshape(8, 1)


def _rows(x: Any, index: Any) -> Any:
    return x.ap([[8, 8], [1, 8]], vector_offset=nl.load(index), indirect_dim=0)


@pytest.mark.parametrize(
    "body",
    [
        lambda x, i: nisa.dma_copy(_tile(4, 16), x),
        lambda x, i: nisa.dma_copy(_tile(8, 8), x, dge_mode=dge.hwdge, engine=nisa.engine.sync),
        lambda x, i: nisa.dma_copy(_tile(8, 8), _rows(x, i), dge_mode=dge.swdge),
        lambda x, i: nisa.dma_copy(_tile(8, 8, dtype="bfloat16"), x, dge_mode=dge.none),
        lambda x, i: nisa.dma_copy(x, _tile(8, 8)),
        lambda x, i: nisa.dma_copy(_tile(8, 8), _tile(8, 8)),
    ],
)
@nki.strict(dma_reshape="off")
def test_legal_copies_pass(body: Any) -> None:
    _on(body, X, INDEX)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda x, i: nisa.dma_copy(_tile(8, 7), x), r"\(56 elements\), src .* must agree"),
        (
            lambda x, i: nisa.dma_copy(_tile(8, 8, dtype="bfloat16"), x, dge_mode=dge.hwdge),
            "hwdge cannot cast float32 to bfloat16",
        ),
        (
            lambda x, i: nisa.dma_copy(_tile(8, 8), _rows(x, i), dge_mode=dge.hwdge),
            "vector_offset with dge_mode.hwdge; allowed: unknown, swdge",
        ),
        (
            lambda x, i: nisa.dma_copy(
                _tile(1, 8),
                x.ap([[8, 1], [1, 8]], scalar_offset=nisa.register_alloc(1), indirect_dim=0),
                dge_mode=dge.none,
            ),
            "run-time offset with dge_mode.none",
        ),
        (
            lambda x, i: nisa.dma_copy(_tile(8, 8), x, engine=nisa.engine.sync),
            r"allowed: sync or scalar, with dge_mode\.hwdge only",
        ),
        (
            lambda x, i: nisa.dma_copy(
                _tile(8, 8), x, dge_mode=dge.hwdge, engine=nisa.engine.vector
            ),
            "allowed: sync or scalar",
        ),
        (lambda x, i: nisa.dma_copy(_tile(8, 8), x, priority=1), "priority 1 exists on trn3"),
        (lambda x, i: nisa.dma_copy(_tile(8, 8), x, oob_mode="skip"), "allowed: error, skip"),
        (lambda x, i: nisa.dma_copy(x.ap([[0, 8], [1, 8]]), _tile(8, 8)), "broadcast dimension"),
        (lambda x, i: nisa.dma_copy(_tile(8, 8), 3), "operand src is a int"),
        (
            lambda x, i: nisa.tensor_copy(_tile(8, 8), _rows(x, i)),
            "is in shared_hbm; allowed: psum, sbuf",
        ),
        (
            lambda x, i: _tile(8, 8).ap([[8, 8], [1, 8]], vector_offset=nl.load(i)),
            "only HBM tensors",
        ),
        (
            lambda x, i: x.ap([[8, 8], [1, 8]], vector_offset=nl.load(i), indirect_dim=1),
            "indirect_dim=1; allowed: 0",
        ),
        (lambda x, i: x.ap([[8, 8]], vector_offset=_tile(8, 1)), "dtype float32; allowed: int32"),
        (
            lambda x, i: x.ap([[8, 8]], vector_offset=nl.load(i), scalar_offset=nl.load(i[0:1])),
            "exclude each other",
        ),
        (lambda x, i: x.ap([[8, 8]], scalar_offset=nl.load(i)), "one element in SBUF"),
        (lambda x, i: x.ap([[8, 8]], scalar_offset=3), "a run-time value or a one-element"),
        (
            lambda x, i: _tile(8, 8).ap([[8, 8], [1, 8]], scalar_offset=nisa.register_alloc(0)),
            "the partition dimension cannot be dynamic",
        ),
        (lambda x, i: _rows(x, i)[0:2], "takes part in the indirection"),
        (lambda x, i: _rows(x, i).ap([[8, 8]]), "has a run-time address already"),
        (lambda x, i: nisa.dma_compute(_tile(8, 8), [x, x], nl.multiply), "allowed: nl.add"),
        (
            lambda x, i: nisa.dma_compute(_tile(8, 8), [x] * 17, nl.add),
            "17 sources; allowed: 1",
        ),
        (
            lambda x, i: nisa.dma_compute(_tile(8, 8), [x, x], nl.add, scales=[1.0, 2.0]),
            "allowed: None or one 1.0",
        ),
        (
            lambda x, i: nisa.dma_compute(_tile(8, 8), [_rows(x, i), _tile(8, 8)], nl.add),
            "one source must be the same view as dst",
        ),
    ],
)
def test_illegal_copies_are_named(body: Any, text: str) -> None:
    with pytest.raises(NkiValidationError, match=text):
        _on(body, X, INDEX)


@pytest.mark.parametrize(
    ("shape", "axes"), [((16, 24), (1, 0)), ((4, 3, 8), (2, 1, 0)), ((4, 2, 3, 8), (3, 1, 2, 0))]
)
@nki.strict(transpose_rows="off")
def test_dma_transpose_reverses_by_the_documented_permutations(shape: Any, axes: Any) -> None:
    x = np.arange(np.prod(shape)).reshape(shape).astype(ml_dtypes.bfloat16)
    found: list[Any] = []

    def body(a: Any) -> None:
        tile = nl.ndarray(x.transpose(axes).shape, dtype=nl.bfloat16)
        nisa.dma_transpose(tile, a, axes=axes)
        found.append(tile.numpy())

    _on(body, x)
    np.testing.assert_array_equal(found[0], x.transpose(axes))


def test_a_skipped_row_of_a_gather_transpose_keeps_its_column() -> None:
    table = np.arange(64 * 8).reshape(64, 8).astype(np.float16)
    rows = np.arange(16, dtype=np.uint32).reshape(16, 1)
    rows[3], rows[5] = 64, 0xFFFFFFFF
    found: list[Any] = []

    def body(a: Any, i: Any) -> None:
        tile = nl.full((8, 16), 7, dtype=nl.float16)
        source = a.ap([[8, 16], [1, 8]], vector_offset=nl.load(i), indirect_dim=0)
        nisa.dma_transpose(tile, source, oob_mode=nisa.oob_mode.skip)
        found.append(tile.numpy())

    _on(body, table, rows)
    expected = table[:16].T.copy()
    expected[:, [3, 5]] = 7
    np.testing.assert_array_equal(found[0], expected)


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "text"),
    [
        ((8, 16), "float32", {}, "dst has dtype float16, src float32"),
        ((8, 16), "float16", {"axes": (0, 1)}, r"axes \(0, 1\) .* allowed: \(1, 0\)"),
        ((8, 17), "float16", {}, r"dst has shape \(16, 8\); needed \(17, 8\)"),
        ((8, 16), "float16", {"dge_mode": dge.hwdge}, "a 2-D src has 16 rows"),
        ((8, 16), "float16", {"dge_mode": dge.swdge}, "only with a vector_offset"),
        ((8, 16), "float16", {"oob_mode": nisa.oob_mode.skip}, "run-time address on src only"),
    ],
)
@nki.strict(transpose_rows="off")
def test_illegal_transposes_are_named(shape: Any, dtype: str, options: Any, text: str) -> None:
    def body(a: Any) -> None:
        nisa.dma_transpose(nl.ndarray((16, 8), dtype=nl.float16), a, **options)

    _on(body, np.zeros((8, 16), np.float16)) if options == {} and dtype == "float16" else None
    with pytest.raises(NkiValidationError, match=text):
        _on(body, np.zeros(shape, dtype))


@nki.strict(transpose_rows="off")
def test_descriptors_made_by_the_host_transpose_from_a_static_address_only() -> None:
    table = np.arange(32, dtype=np.float16).reshape(4, 8)
    got: list[Any] = []

    def body(a: Any, moving: bool) -> None:
        tile = nl.ndarray((8, 2), dtype=nl.float16)
        offset = nisa.register_alloc(1) if moving else None
        source = a.ap([[8, 2], [1, 8]], scalar_offset=offset, indirect_dim=0)
        nisa.dma_transpose(tile, source, dge_mode=dge.none)
        got.append(tile.numpy())

    _on(lambda a: body(a, False), table)
    np.testing.assert_array_equal(got[0], table[:2].T)
    with pytest.raises(NkiValidationError, match="none, whose descriptors are static"):
        _on(lambda a: body(a, True), table)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (np.zeros((16, 1), np.int32), "dtype int32; allowed: 2-D uint32"),
        (np.zeros((8, 2), np.uint32), "16..128 rows, a multiple of 16"),
        (np.zeros((16, 2), np.uint32), "more than one column needs 128 rows"),
    ],
)
def test_gather_transpose_indices_have_the_documented_form(index: Any, text: str) -> None:
    def body(a: Any, i: Any) -> None:
        source = a.ap([[8, 16], [1, 8]], vector_offset=nl.load(i), indirect_dim=0)
        nisa.dma_transpose(nl.ndarray((8, 16), dtype=nl.float16), source)

    table = np.zeros((64, 8), np.float16)
    _on(body, table, np.zeros((16, 1), np.uint32))
    with pytest.raises(NkiValidationError, match=text):
        _on(body, table, index)


def test_reading_hbm_that_nothing_wrote_is_reported() -> None:
    def body(x: Any) -> None:
        hbm = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.private_hbm, name="scratch")
        nisa.dma_copy(hbm[0:4], nl.load(x[0:4]))
        nisa.dma_copy(_tile(4, 8), hbm[0:4])
        partly = _tile(4, 8)
        nisa.dma_copy(partly, hbm[2:6])
        nisa.tensor_copy(_tile(2, 8), partly[0:2])
        nisa.dma_copy(_tile(4, 8), hbm[4:8])

    with pytest.raises(NkiValidationError, match=r"'scratch' .* 32 of 32 elements that"):
        _on(body, X)
