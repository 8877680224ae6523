"""Indexing and view methods against NumPy, and what they refuse."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats, run

nl, nisa = nki.language, nki.isa


def _view(
    view: Callable[[Any], Any], shape: tuple[int, ...], on_chip: bool, dtype: str = "float32"
) -> Any:
    """The values of `view(t)` for a tensor filled with 0, 1, 2, ..."""
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    found: list[Any] = []

    @nki.jit
    def kernel(a: Any) -> None:
        t = a
        if on_chip:
            t = nl.ndarray(shape, dtype=dtype)
            nisa.dma_copy(t, a)
        found.append(view(t).numpy())

    kernel(x)
    return found[0]


def _arange(*shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(
    ("shape", "key", "on_chip", "expected"),
    [
        ((128, 64, 32), np.s_[0, :, :], True, (1, 64, 32)),
        ((64, 64, 64), np.s_[:, 0], True, (64, 64)),
        ((64, 6, 12), np.s_[:, 0, 10], True, (64, 1)),
        ((64, 6, 12), np.s_[0, 0, 10], True, (1, 1)),
        ((4, 12, 32), np.s_[0], False, (12, 32)),
        ((4, 12), np.s_[1, 2], False, (1,)),
        ((8, 6), np.s_[..., -1], True, (8, 1)),
        ((8, 6), np.s_[-2:, 1::2], True, (2, 3)),
    ],
)
def test_integers_keep_the_partition_dimension_and_two_dimensions_on_chip(
    shape: Any, key: Any, on_chip: bool, expected: Any
) -> None:
    got = _view(lambda t: t[key], shape, on_chip)
    assert got.shape == expected
    np.testing.assert_array_equal(got.reshape(-1), np.ravel(_arange(*shape)[key]))


@given(st.data())
def test_chained_slices_select_what_numpy_selects(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=4)))
    on_chip = data.draw(st.booleans())
    keys: list[Any] = []
    sizes = list(shape)
    for _ in range(data.draw(st.integers(1, 3))):
        key = []
        for d, n in enumerate(sizes):
            start = data.draw(st.integers(0, n - 1))
            stop = data.draw(st.integers(start + 1, n))
            step = data.draw(st.integers(1, 3))
            key.append(slice(start, stop, step))
            sizes[d] = len(range(start, stop, step))
        keys.append(tuple(key))
    expected = _arange(*shape)
    for key in keys:
        expected = expected[key]

    def chain(t: Any) -> Any:
        for key in keys:
            t = t[key]
        return t

    np.testing.assert_array_equal(_view(chain, shape, on_chip), expected)


@given(st.data())
def test_reshape_is_the_no_copy_reshape_of_numpy(data: st.DataObject) -> None:
    a, b, c, d = (data.draw(st.integers(1, 4)) for _ in range(4))
    source = _arange(a, b, c * 2, d)
    step = data.draw(st.integers(1, 2))
    strided = source[:, :, ::step]
    sizes = data.draw(st.permutations([b, strided.shape[2], d]))
    shape = data.draw(st.sampled_from([(a, *sizes), (a, b * strided.shape[2] * d)]))
    copies = not np.shares_memory(strided.reshape(shape), source)

    def view(t: Any) -> Any:
        return t[:, :, ::step].reshape(shape)

    if copies:
        with pytest.raises(NkiValidationError, match="do not allow it without a copy"):
            _view(view, source.shape, True)
    else:
        np.testing.assert_array_equal(_view(view, source.shape, True), strided.reshape(shape))


X = _arange(8, 2, 3, 4)
METHODS: list[tuple[Callable[[Any], Any], Any]] = [
    (lambda t: t.permute((0, 3, 1, 2)), X.transpose(0, 3, 1, 2)),
    (lambda t: t.reshape_dim(3, (2, -1)), X.reshape(8, 2, 3, 2, 2)),
    (lambda t: t.flatten_dims(1, 2), X.reshape(8, 6, 4)),
    (lambda t: t.expand_dim(2), X[:, :, None]),
    (lambda t: t.expand_dim(4), X[..., None]),
    (lambda t: t.expand_dim(1).squeeze_dim(1), X),
    (lambda t: t.expand_dim(1).broadcast(1, 3), np.repeat(X[:, None], 3, axis=1)),
    (lambda t: t.slice(2, 1, 3), X[:, :, 1:3]),
    (lambda t: t.slice(3, 0, 4, 3), X[..., ::3]),
    (lambda t: t.select(2, 1), X[:, :, 1]),
    (
        lambda t: t.rearrange(("p", "a", "b", ("c", "d")), ("p", "d", ("b", "a"), "c"), {"c": 2}),
        None,
    ),
    (lambda t: nl.expand_dims(t, 1), X[:, None]),
    (lambda t: nl.broadcast_to(t[:, 0:1], (8, 5, 3, 4)), np.repeat(X[:, 0:1], 5, axis=1)),
    (lambda t: t[nl.ds(2, 4), nl.ds(1, 1)], X[2:6, 1:2]),
]


@pytest.mark.parametrize("on_chip", [True, False])
@pytest.mark.parametrize("number", range(len(METHODS)))
def test_view_methods_agree_with_numpy(number: int, on_chip: bool) -> None:
    view, expected = METHODS[number]
    if expected is None:  # the merge of (b, a) is not contiguous: refused
        with pytest.raises(NkiValidationError, match="is not contiguous over these dimensions"):
            _view(view, X.shape, on_chip)
    else:
        np.testing.assert_array_equal(_view(view, X.shape, on_chip), expected)


def test_rearrange_splits_reorders_and_merges() -> None:
    x = _arange(128, 24)
    got = _view(lambda t: t.rearrange(("b", ("h", "w")), ("b", "w", "h"), {"h": 4}), x.shape, True)
    np.testing.assert_array_equal(got, x.reshape(128, 4, 6).transpose(0, 2, 1))


def test_view_reinterprets_bits_and_scales_the_last_dimension() -> None:
    x = _arange(4, 6)
    np.testing.assert_array_equal(
        _view(lambda t: t.view(nl.uint16), x.shape, True), x.view(np.uint16)
    )
    np.testing.assert_array_equal(
        _view(lambda t: t.view(nl.uint8)[:, 4:12].view(nl.float32), x.shape, True), x[:, 1:3]
    )
    with pytest.raises(NkiValidationError, match="it must be contiguous"):
        _view(lambda t: t[:, ::2].view(nl.uint16), x.shape, True)
    with pytest.raises(NkiValidationError, match="must be multiples of 2"):
        _view(lambda t: t.view(nl.uint16)[:, 1:3].view(nl.float32), x.shape, True)


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (lambda t: t[:, :, :, :, 0], "has 5 entries for a tensor of shape"),
        (lambda t: t[8], "index 8 on dimension 0 of size 8"),
        (lambda t: t[:, 2:2], "selects nothing"),
        (lambda t: t[:, ::-1], "step -1; allowed >= 1"),
        (lambda t: t[:, nl.ds(1, 2)], r"nl\.ds\(1, 2\) leaves dimension 1 of size 2"),
        (lambda t: t[:, [0, 1]], "allowed are integers, slices"),
        (lambda t: t[:, range(0, 4, 2)], r"write 0:4:2 instead of a range"),
        (lambda t: t[t], "a tensor index is"),
        (lambda t: t.permute((1, 0, 2, 3)), "the partition dimension must stay first"),
        (lambda t: t.permute((0, 1, 1, 2)), "no permutation"),
        (lambda t: t.broadcast(1, 4), "dimension 1 has size 2; allowed is 1"),
        (lambda t: t.expand_dim(0), "allowed are the free dimensions"),
        (lambda t: t.squeeze_dim(1), "dimension 1 has size 2; allowed is 1"),
        (lambda t: t.reshape_dim(1, (3, -1)), "product 0, needed 2"),
        (lambda t: t.reshape((4, 48)), "the partition dimension 8 must stay first"),
        (lambda t: t.reshape((8, 23)), "product 184, needed 192"),
        (lambda t: t.flatten_dims(0, 1), "allowed are the free dimensions"),
        (lambda t: t.slice(1, 1, 3), "allowed is 0 <= start < end <= 2"),
        (lambda t: t.select(1, 2), r"allowed is 0\.\.1"),
        (
            lambda t: t.ap([[24, 8], [1, 25]]),
            r"elements 0\.\.24 of a partition; the tile has 0\.\.23",
        ),
        (lambda t: t.ap([[20, 8], [1, 4]]), "partition step 20 .* it must be 24"),
        (lambda t: t.ap([[24, 8], [1, 0]]), "every count must be at least 1"),
    ],
)
def test_views_outside_the_tensor_or_the_rules_are_refused(view: Any, text: str) -> None:
    with pytest.raises(NkiValidationError, match=text):
        _view(view, X.shape, True)


def test_an_access_pattern_has_zero_or_any_free_strides() -> None:
    x = _arange(4, 12)
    got = _view(lambda t: t.ap([[12, 4], [0, 2], [5, 2], [1, 3]], offset=2), x.shape, True)
    expected = np.stack([x[:, [2, 3, 4]], x[:, [7, 8, 9]]], axis=1)[:, None].repeat(2, axis=1)
    np.testing.assert_array_equal(got, expected)


@nki.strict(ap_view="off")
def test_an_access_pattern_may_repeat_one_partition() -> None:
    x = _arange(4, 3)
    got = _view(lambda t: t[1:2].ap([[0, 5], [1, 3]]), x.shape, True)
    np.testing.assert_array_equal(got, np.repeat(x[1:2], 5, axis=0))


@nki.strict(ap_view="off")
def test_a_pattern_on_a_view_counts_rows_of_the_storage_or_of_the_view() -> None:
    """Both readings occur in published kernels; the partition step tells which is meant."""
    x = _arange(8, 1024)
    for step in (512, 1024):

        def view(t: Any, step: int = step) -> Any:
            return t[:, 512:].ap([[step, 8], [1, 512]])

        np.testing.assert_array_equal(_view(view, x.shape, True), x[:, 512:])


def test_a_pattern_of_another_dtype_counts_elements_of_that_dtype() -> None:
    x = _arange(4, 8)
    got = _view(lambda t: t.ap([[16, 4], [2, 8]], offset=1, dtype=nl.uint16), x.shape, True)
    np.testing.assert_array_equal(got, x.view(np.uint16)[:, 1::2])


def test_views_share_their_storage() -> None:
    def body(t: Any) -> Any:
        nisa.memset(t[:, 1], -1.0)
        nisa.tensor_copy(t.view(nl.uint32)[:, 0:1], t.view(nl.uint32)[:, 1:2])
        return t

    got = _view(body, (4, 3), True)
    np.testing.assert_array_equal(got, np.array([[-1, -1, c] for c in (2, 5, 8, 11)]))


def test_shape_strides_pattern_and_contiguity_are_those_of_the_view() -> None:
    @nki.jit
    def kernel() -> None:
        t = nl.zeros((8, 4, 6), dtype=nl.float32, name="t")
        v = t[:, 1:3, ::2]
        assert (t.shape, t.strides, t.offset, t.ndim, t.size) == ((8, 4, 6), (24, 6, 1), 0, 3, 192)
        assert (v.shape, v.strides, v.offset) == ((8, 2, 3), (24, 6, 2), 6)
        assert v.get_pattern() == [[24, 8], [6, 2], [2, 3]]
        assert (t.is_contiguous(), t[:, 0:2].is_contiguous(), v.is_contiguous()) == (
            True,
            True,
            False,
        )
        assert (t.dtype, t.buffer, t.name, v.name) == ("float32", nl.sbuf, "t", "t")
        assert not t.is_indirect()

    kernel()


def test_ndarray_is_a_class_that_every_tensor_is_an_instance_of() -> None:
    @nki.jit
    def kernel(a: Any) -> None:
        assert isinstance(a, nl.ndarray)
        assert isinstance(a, nl.NkiTensor)

    kernel(_arange(4, 3))
    optional: Any = nl.ndarray | None
    assert optional.__args__ == (nl.ndarray, type(None))


def test_a_pattern_outside_its_tile_is_an_error_where_it_is_used() -> None:
    def unused(dst: Any, x: Any) -> None:
        x.ap([[8, 4], [2, 4]], offset=2)
        nisa.tensor_copy(dst, x)

    def used(dst: Any, x: Any) -> None:
        nisa.tensor_copy(dst, x.ap([[8, 4], [2, 4]], offset=2))

    x = floats(4, 8)
    np.testing.assert_array_equal(run(unused, x), x)
    with pytest.raises(NkiValidationError, match=r"free part reaches elements 2\.\.8"):
        run(used, x, out=((4, 4), "float32"))
