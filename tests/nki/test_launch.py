"""Launching kernels: arguments, results, prints and constants."""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, NkiWarning

# the tests pass wrong types on purpose
nl: Any = nki.language
nisa: Any = nki.isa


@nki.jit
def double_kernel(a: Any, factor: Any = 2.0) -> Any:
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    tile = nl.load(a)
    nisa.tensor_scalar(tile, tile, nl.multiply, factor)
    nisa.dma_copy(out, tile)
    return out


def test_simulate_and_direct_calls_give_the_same_and_keywords_work() -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(double_kernel(x), 2 * x)
    np.testing.assert_array_equal(nki.simulate(double_kernel)(x, factor=3.0), 3 * x)
    np.testing.assert_array_equal(nki.simulate(double_kernel.function)(a=x), 2 * x)


def test_a_kernel_called_inside_a_kernel_is_a_plain_call() -> None:
    @nki.jit
    def outer(a: Any) -> Any:
        return double_kernel(double_kernel(a))

    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(outer(x), 4 * x)


def test_arrays_inside_tuples_and_dicts_are_bound_and_returned() -> None:
    @nki.jit
    def kernel(pair: Any, named: Any) -> Any:
        return {"sum": double_kernel(pair[0]), "all": (double_kernel(named["b"]), 5)}

    x = np.ones((2, 4), np.float32)
    got = kernel((x, None), {"b": 3 * x})
    np.testing.assert_array_equal(got["sum"], 2 * x)
    np.testing.assert_array_equal(got["all"][0], 6 * x)
    assert got["all"][1] == 5


@nki.jit
def fill_kernel(a: Any) -> Any:
    nisa.dma_copy(a, nl.full(a.shape, 9.0, dtype=a.dtype))
    return a


def test_a_view_that_is_not_contiguous_is_copied_in_and_back() -> None:
    base = np.zeros((4, 6), np.float32)
    view = base[:, ::2]
    assert fill_kernel(view) is view
    np.testing.assert_array_equal(base, np.tile([9, 0], (4, 3)))


def test_a_read_only_array_is_left_alone() -> None:
    x = np.zeros((4, 6), np.float32)
    x.flags.writeable = False
    np.testing.assert_array_equal(fill_kernel(x), np.full((4, 6), 9))
    np.testing.assert_array_equal(x, 0)


def test_an_empty_array_and_a_scalar_array() -> None:
    np.testing.assert_array_equal(fill_kernel(np.zeros((1, 1), np.float32)), [[9]])
    with pytest.raises(NkiValidationError, match=r"argument 'a' has shape \(0, 3\)"):
        fill_kernel(np.zeros((0, 3), np.float32))


def test_the_state_of_a_failed_launch_does_not_leak_into_the_next() -> None:
    @nki.jit
    def broken(a: Any) -> None:
        nisa.tensor_copy(a, a)

    x = np.ones((2, 4), np.float32)
    with pytest.raises(NkiValidationError):
        broken(x)
    np.testing.assert_array_equal(double_kernel(x), 2 * x)


def test_static_ranges_still_run_and_can_be_reported() -> None:
    @nki.jit
    def kernel() -> Any:
        affine = list(nl.affine_range(3))
        return affine, list(nl.sequential_range(1, 3)), list(nl.static_range(4, 0, -2))

    assert kernel() == ([0, 1, 2], [1, 2], [4, 2])
    with nki.strict(deprecated="warn"), pytest.warns(NkiWarning) as caught:
        kernel()
    messages = [str(w.message) for w in caught]
    assert [text.partition(" is")[0] for text in messages] == [
        "nl.affine_range",
        "nl.sequential_range",
        "nl.static_range",
    ]


def test_a_line_warns_once_per_rule_and_launch() -> None:
    @nki.jit
    def kernel() -> None:
        for _ in range(3):
            list(nl.affine_range(3))

    with nki.strict(deprecated="warn"):
        for _ in range(2):
            with pytest.warns(NkiWarning) as caught:
                kernel()
            assert len(caught) == 1


def test_a_breakpoint_stops_in_the_kernel_where_tiles_show_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def stop() -> None:
        frame = sys._getframe(1)
        seen.append((frame.f_code.co_name, frame.f_locals["tile"].numpy()))

    monkeypatch.setattr(sys, "breakpointhook", stop)

    @nki.jit
    def kernel(x: Any) -> None:
        tile = nl.load(x)
        breakpoint()
        nisa.tensor_scalar(tile, tile, nl.add, 1.0)

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for launch in (kernel, kernel[2]):
        launch(x)
    assert [name for name, _ in seen] == ["kernel"] * 3
    np.testing.assert_array_equal([values for _, values in seen], [x] * 3)


def test_device_print_shows_prefix_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    @nki.jit
    def kernel(a: Any) -> None:
        tile = nl.load(a)
        nl.device_print("tile:", tile)
        print(tile[0:1])

    kernel(np.array([[1.5, 2.5]], np.float32))
    out = capsys.readouterr().out
    assert out.startswith("tile: [[1.5 2.5]]")
    assert "(1, 2), float32, sbuf)\n[[1.5 2.5]]" in out


def test_constants_and_identities(tmp_path: Any) -> None:
    table = np.arange(6, dtype=np.int32).reshape(2, 3)
    np.save(tmp_path / "table.npy", table)

    @nki.jit
    def kernel() -> Any:
        first, second = nl.shared_constant(table), nl.shared_constant(str(tmp_path / "table.npy"))
        identity = nl.shared_identity_matrix(4, dtype=nl.bfloat16)
        assert nl.shared_identity_matrix(4, dtype=nl.bfloat16).storage is identity.storage
        out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, identity)
        return first, second, out

    first, second, identity = kernel()
    np.testing.assert_array_equal(first, table)
    np.testing.assert_array_equal(second, table)
    np.testing.assert_array_equal(identity, np.eye(4))


def test_creation_functions_fill_and_copy_shapes() -> None:
    @nki.jit
    def kernel() -> Any:
        like = nl.full((2, 3), 1.5, dtype=nl.bfloat16, buffer=nl.shared_hbm)
        zeros, ones = nl.zeros_like(like), nl.ones((2, 3), nl.int8, nl.shared_hbm)
        empty = nl.empty_like(like, dtype=nl.float16, buffer=nl.sbuf)
        assert (empty.shape, empty.dtype, empty.buffer) == ((2, 3), "float16", nl.sbuf)
        return like, zeros, ones

    like, zeros, ones = kernel()
    assert (like == 1.5).all()
    assert (zeros == 0).all()
    assert (ones == 1).all()


def test_nki_objects_are_built_as_the_compiler_evaluates_them() -> None:
    @dataclass
    class Sizes(nki.language.NKIObject):
        rows: int
        columns: int
        total = 0

    sizes: Any = Sizes
    made = sizes(rows=3, total=5)
    assert (made.rows, made.columns, made.total) == (3, None, 5)

    class Config(nki.language.NKIObject):
        pass

    config: Any = Config(width=4)
    assert config.width == 4


def test_instructions_return_handles_that_order_others() -> None:
    @nki.jit
    def kernel() -> None:
        tile = nl.ndarray((2, 2), dtype=nl.float32)
        first = nisa.memset(tile, 0.0)
        second = nisa.memset(tile, 1.0)
        assert second.depends_on(first) is second
        with pytest.raises(TypeError, match="no instruction handle"):
            second.depends_on(tile)

    kernel()


def test_an_unknown_keyword_is_an_error() -> None:
    with pytest.raises(TypeError, match="fraktor"):
        double_kernel(np.ones((2, 2), np.float32), fraktor=2.0)
    with pytest.raises(NkiValidationError, match="platform_target"):
        nki.jit(platform_target="trn1")
