"""The body of a dynamic loop is traced once: Python state may not make its trips differ."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, NkiWarning, UninitializedReadError

# the bodies are written as a kernel author might, closures and lists and all
nl: Any = nki.language
nisa: Any = nki.isa

TRIPS = 3


@nki.strict(loop_psum="off")
def test_whether_a_matmul_adds_is_the_same_in_every_trip() -> None:
    def kernel(x: Any, inside: Any, accumulate: Any) -> Any:
        out = nl.ndarray((4, 4), dtype=x.dtype, buffer=nl.shared_hbm)
        tile, total = nl.load(x), nl.zeros((4, 4), dtype=nl.float32, buffer=nl.sbuf)
        outside = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)

        def body(i: Any) -> None:
            psum = outside
            if inside:
                psum = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(psum, tile, tile, accumulate=accumulate)
            nisa.nc_matmul(psum, tile, tile)
            nisa.tensor_tensor(total, total, psum, nl.add)

        nl.fori_loop(0, TRIPS, body)
        nisa.dma_copy(out, total)
        return out

    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    expected = TRIPS * 2 * (x.T @ x)
    np.testing.assert_array_equal(nki.jit(kernel)(x, True, None), expected)
    np.testing.assert_array_equal(nki.jit(kernel)(x, False, False), expected)
    with pytest.raises(NkiValidationError, match=r"trip 1 adds to PSUM .* accumulate=None"):
        nki.jit(kernel)(x, False, None)


Body = Callable[[Any, dict[str, Any]], None]


class _Counter(nki.language.NKIObject):
    def __init__(self) -> None:
        self.count = 0


def add(tile: Any, value: Any) -> None:
    nisa.tensor_scalar(tile, tile, nl.add, value)


def _length(t: Any, s: dict[str, Any]) -> None:
    s["list"].append(1)
    add(t, float(len(s["list"])))


def _attribute(t: Any, s: dict[str, Any]) -> None:
    s["counter"].count += 1
    add(t[:, : s["counter"].count], 1.0)


def _operator(t: Any, s: dict[str, Any]) -> None:
    s["op"] = nl.subtract if s["op"] is nl.add else nl.add
    nisa.tensor_scalar(t, t, s["op"], 1.0)


def _offset(t: Any, s: dict[str, Any]) -> None:
    s["n"] += 1
    nisa.tensor_copy(t[:, 0:1], t[:, s["n"] : s["n"] + 1])


def _more(t: Any, s: dict[str, Any]) -> None:
    s["n"] += 1
    for _ in range(s["n"]):
        add(t, 1.0)


def _fewer(t: Any, s: dict[str, Any]) -> None:
    s["n"] += 1
    for _ in range(4 - s["n"]):
        add(t, 1.0)


def _first_only(t: Any, s: dict[str, Any]) -> None:
    if not s["list"]:
        s["list"].append(1)
        nisa.memset(t, 0.0)
    add(t, 1.0)


def _tile_before(t: Any, s: dict[str, Any]) -> None:
    made = nl.ndarray((2, 4), dtype=nl.float32)
    nisa.tensor_copy(made, s["tile"])
    s["tile"] = made


def _exchange(t: Any, s: dict[str, Any]) -> None:
    one, other = s["pair"]
    nisa.tensor_scalar(other, one, nl.add, 1.0)
    s["pair"] = (other, one)


def _register(t: Any, s: dict[str, Any]) -> None:
    s["n"] += 1
    nisa.register_move(s["register"], s["n"])


def _output_row(t: Any, s: dict[str, Any]) -> None:
    s["n"] += 1
    nisa.dma_copy(s["out"][s["n"]], t[0:1, :])


def _run(body: Body, loop: str) -> Any:
    @nki.jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, x)
        tiles = [nl.ones((2, 4), dtype=nl.float32) for _ in range(4)]
        state: dict[str, Any] = {
            "list": [], "counter": _Counter(), "op": nl.subtract, "n": 0, "out": out,
            "tile": tiles[1], "pair": (tiles[2], tiles[3]), "register": nisa.register_alloc(0),
            "ring": tiles[1:],
        }  # fmt: skip
        if loop == "fori":
            nl.fori_loop(0, TRIPS, lambda i: body(tiles[0], state))
        else:
            count, one = nl.full((1, 1), TRIPS, dtype=nl.int32), nl.ones((1, 1), dtype=nl.int32)

            def step(register: Any) -> Any:
                body(tiles[0], state)
                nisa.tensor_tensor(count, count, one, nl.subtract)
                nisa.register_load(register, count)
                return register

            nl.while_loop(nisa.register_alloc(TRIPS), step)
        nisa.dma_copy(out[0:2], tiles[0])
        if "after" in state:
            nisa.dma_copy(out[2:4], state["after"])
        return out

    return kernel(np.zeros((4, 4), np.float32))


@pytest.mark.parametrize("loop", ["fori", "while"])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (_length, r"trip 1 passes operand0=2\.0 to tensor_scalar instead of 1\.0"),
        (_attribute, "trip 1 passes another dst to tensor_scalar"),
        (_operator, "trip 1 passes another op0 to tensor_scalar"),
        (_offset, "trip 1 passes another src to tensor_copy"),
        (_more, r"trip 1 (goes on with tensor_scalar|runs tensor_scalar where tensor_tensor)"),
        (_fewer, r"trip 1 (ends before|runs tensor_tensor where) tensor_scalar"),
        (_first_only, "trip 1 runs tensor_scalar where memset of line"),
        (_tile_before, "trip 1 reads another tile in tensor_copy, 'made', before it writes it"),
        (_exchange, "trip 1 reads another tile in tensor_scalar"),
        (_register, "trip 1 passes src=2 to register_move instead of 1"),
        (_output_row, "trip 1 passes another dst to dma_copy"),
    ],
)
def test_python_state_that_changes_a_later_trip_is_refused(
    body: Body, text: str, loop: str
) -> None:
    where = {"fori": "nl.fori_loop", "while": "nl.while_loop"}[loop]
    with pytest.raises(NkiValidationError, match=rf"{where}: {text}.*\[rule loop_state\]") as e:
        _run(body, loop)
    assert "test_loops_traced_once.py:" in str(e.value)
    with nki.strict(loop_state="off"):
        _run(body, loop)


def _same_again(t: Any, s: dict[str, Any]) -> None:
    """State that every trip sets anew, tiles and registers of the trip, shared constants."""
    s["n"] = 0
    for _ in range(2):
        s["n"] += 1
        add(t, float(s["n"]))
    made = nl.load(s["out"][0:2])
    register = nisa.register_alloc(s["n"])
    nisa.dma_copy(made, s["out"].ap([[4, 2], [1, 4]], scalar_offset=register, indirect_dim=0))
    identity = nl.shared_identity_matrix(2, dtype=nl.float32)
    product = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(product, identity, made)
    nisa.tensor_copy(made, product)
    s["list"].append(made)
    nisa.tensor_scalar(t, t, nl.add, float("nan"))


def _ring(t: Any, s: dict[str, Any]) -> None:
    """Scratch in turn by a Python counter."""
    scratch = s["ring"][s["n"] % 3]
    s["n"] += 1
    nisa.tensor_copy(scratch, t)
    nisa.tensor_scalar(t, scratch, nl.add, 1.0)


@pytest.mark.parametrize("loop", ["fori", "while"])
@pytest.mark.parametrize("body", [_same_again, _ring])
def test_a_body_whose_trips_are_the_same_program_passes(body: Body, loop: str) -> None:
    got = _run(body, loop)
    if body is _ring:
        np.testing.assert_array_equal(got[0:2], np.full((2, 4), 1 + TRIPS))


def test_scratch_that_trips_exchanged_is_undefined_after_the_loop() -> None:
    def body(t: Any, s: dict[str, Any]) -> None:
        _ring(t, s)
        s["after"] = s["ring"][(s["n"] - 1) % 3]

    text = r"trip 2 wrote 'tiles' where the first trip used another tile.*test_loops_traced_once"
    with pytest.raises(UninitializedReadError, match=text):
        _run(body, "fori")


@nki.strict(nested_loops="off")
def test_a_nested_loop_is_followed_on_its_own() -> None:
    def good(t: Any, s: dict[str, Any]) -> None:
        nl.fori_loop(0, 2, lambda j: add(t, 1.0))
        add(t, 2.0)

    np.testing.assert_array_equal(_run(good, "fori")[0:2], np.full((2, 4), 1 + TRIPS * 4))

    def bad(t: Any, s: dict[str, Any]) -> None:
        nl.fori_loop(0, 2, lambda j: _length(t, s))

    with pytest.raises(NkiValidationError, match=r"trip 1 passes operand0=2\.0"):
        _run(bad, "fori")


def test_a_warning_comes_once_per_loop() -> None:
    with nki.strict(loop_state="warn"), pytest.warns(NkiWarning) as caught:
        _run(_length, "fori")
    assert len(caught) == 1


@pytest.mark.parametrize("write", [False, True])
def test_a_tile_that_the_body_declares_does_not_exist_after_the_loop(write: bool) -> None:
    @nki.jit
    def kernel() -> None:
        outside, kept = nl.zeros((4, 4), dtype=nl.float32, buffer=nl.sbuf), []

        def body(i: Any) -> None:
            kept.append(nl.zeros((4, 4), dtype=nl.float32, buffer=nl.sbuf))
            nisa.tensor_tensor(outside, outside, kept[-1], nl.add)

        nl.fori_loop(0, TRIPS, body)
        dst, src = (kept[-1], outside) if write else (outside, kept[-1])
        nisa.tensor_copy(dst, src)

    with nki.strict(purity="off"):
        with pytest.raises(NkiValidationError, match=r"declared in the body of nl\.fori_loop"):
            kernel()
        with nki.strict(loop_state="warn"), pytest.warns(NkiWarning, match="declare it before"):
            kernel()


def test_an_identity_matrix_first_used_in_a_body_exists_after_the_loop() -> None:
    @nki.jit
    def kernel(x: Any) -> Any:
        out = nl.ndarray((32, 32), dtype=x.dtype, buffer=nl.shared_hbm)
        tile = nl.load(x)

        def body(i: Any) -> None:
            psum = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(psum, nl.shared_identity_matrix(32, dtype=nl.float32), tile)
            nisa.tensor_copy(tile, psum)

        nl.fori_loop(0, TRIPS, body)
        psum = nl.ndarray((32, 32), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(psum, nl.shared_identity_matrix(32, dtype=nl.float32), tile)
        nisa.tensor_copy(tile, psum)
        nisa.dma_copy(out, tile)
        return out

    x = np.arange(1024, dtype=np.float32).reshape(32, 32)
    np.testing.assert_array_equal(kernel(x), x)
