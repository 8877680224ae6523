"""Registers, dynamic loops, and what neither takes."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, UninitializedReadError

# the tests pass wrong types on purpose
nl: Any = nki.language
nisa: Any = nki.isa


def test_fori_loop_counts_with_run_time_bounds_and_a_step() -> None:
    seen: list[int] = []

    @nki.jit
    def kernel(bounds: Any) -> None:
        low, high = nisa.register_alloc(), nisa.register_alloc()
        tile = nl.load(bounds)
        nisa.register_load(low, tile[0:1, 0:1])
        nisa.register_load(high, tile[0:1, 1:2])
        nl.fori_loop(low, high, lambda i: seen.append(i.state), step=3)

    kernel(np.array([[2, 12]], np.int32))
    assert seen == [2, 5, 8, 11]
    seen.clear()
    kernel(np.array([[5, 5]], np.int32))
    assert seen == []


def test_the_induction_register_is_read_only() -> None:
    @nki.jit
    def kernel() -> None:
        nl.fori_loop(0, nisa.register_alloc(2), lambda i: nisa.register_move(i, 5))

    with pytest.raises(NkiValidationError, match="the induction register of a loop"):
        kernel()


def test_while_loop_runs_until_its_register_is_zero() -> None:
    seen: list[int] = []

    @nki.jit
    def kernel(start: Any) -> None:
        count = nl.load(start)
        one = nl.ones((1, 1), dtype=nl.int32)
        condition = nisa.register_alloc()
        nisa.register_load(condition, count)

        def body(r: Any) -> Any:
            seen.append(r.state)
            nisa.tensor_tensor(count, count, one, nl.subtract)
            nisa.register_load(r, count)
            return r

        nl.while_loop(condition, body)

    kernel(np.array([[3]], np.int32))
    kernel(np.array([[0]], np.int32))
    assert seen == [3, 2, 1]


def test_registers_move_store_and_wrap_to_32_bits() -> None:
    @nki.jit
    def kernel() -> Any:
        out = nl.ndarray((1, 3), dtype=nl.int32, buffer=nl.shared_hbm)
        a, b = nisa.register_alloc(7), nisa.register_alloc()
        nisa.register_move(b, a)
        nisa.register_store(out[:, 0], b)
        nisa.register_move(b, 12)
        nisa.register_store(out[:, 1], b)
        nisa.register_move(a, 2**31)
        nisa.register_store(out[:, 2], a)
        return out

    np.testing.assert_array_equal(kernel(), [[7, 12, -(2**31)]])


def test_an_unset_register_cannot_be_read() -> None:
    @nki.jit
    def kernel() -> None:
        nisa.register_move(nisa.register_alloc(), nisa.register_alloc())

    with pytest.raises(UninitializedReadError, match="a register is read before"):
        kernel()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (lambda: nl.fori_loop(0, 3, lambda i: i), "the body returned a value"),
        (lambda: nl.fori_loop(0, 3, print, step=0), "step 0; allowed: >= 1"),
        (lambda: nl.fori_loop(0, nl.zeros((1, 1), nl.int32), print), "upper is NkiTensor"),
        (lambda: nl.static_range(nisa.register_alloc(3)), "start is a register; use nl.fori_loop"),
        (lambda: nisa.register_alloc(1.5), "x is float; allowed: None or an integer"),
        (lambda: nisa.register_load(3, nl.zeros((1, 1), nl.int32)), "operand dst is int"),
        (
            lambda: nisa.register_load(nisa.register_alloc(), nl.zeros((2, 1), nl.int32)),
            "must be a tensor with one element",
        ),
    ],
)
def test_loops_and_registers_refuse_what_the_device_cannot_run(body: Any, text: str) -> None:
    @nki.jit
    def kernel() -> None:
        body()

    with pytest.raises(NkiValidationError, match=text):
        kernel()


def test_a_dynamic_loop_inside_no_reorder_is_refused() -> None:
    @nki.jit
    def kernel() -> None:
        with nl.no_reorder():
            for _ in nl.static_range(2):
                nl.zeros((1, 1), dtype=nl.float32)
            nl.fori_loop(0, 1, lambda i: None)

    with pytest.raises(NkiValidationError, match=r"inside nl\.no_reorder"):
        kernel()


@nki.strict(nested_loops="off")
def test_a_nested_loop_does_not_carry_a_register() -> None:
    def count_in(register: Any) -> None:
        nisa.register_move(register, 1)  # the lint does not see which register this is

    def nested(register: Any, _: Any) -> None:
        nl.fori_loop(0, 2, lambda i: count_in(register))

    @nki.jit
    def carries() -> None:
        register = nisa.register_alloc(0)
        nl.fori_loop(0, 2, lambda i: nested(register, i))

    @nki.jit
    def once() -> None:
        nested(nisa.register_alloc(0), 0)

    @nki.jit
    def of_the_trip() -> None:
        nl.fori_loop(0, 2, lambda i: nl.fori_loop(0, 2, lambda j: count_in(nisa.register_alloc())))

    @nki.jit
    def of_the_outer_loop() -> None:
        register = nisa.register_alloc(0)
        nl.fori_loop(0, 2, lambda i: count_in(register))

    with nki.strict(purity="off"):
        with pytest.raises(NkiValidationError, match=r"nested dynamic loop.*\[1, 1\] tile"):
            carries()
        once()
        of_the_trip()
        of_the_outer_loop()
        with nki.strict(loop_state="off"):
            carries()
