"""One illegal kernel and its legal twin for each row of the table of rules from the field.

A case is a kernel whose last argument says whether it breaks the rule. Where the inputs decide, it
gets other inputs instead (`legal`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from segattn.reference import nki

nl, nisa = nki.language, nki.isa
BF16 = ml_dtypes.bfloat16
F32 = np.float32


Kernel = Callable[..., Any]


class Case(NamedTuple):
    """`says` is a pattern of the message: what is wrong, the value, the limit."""

    rule: str
    kernel: Kernel
    inputs: tuple[Any, ...]
    says: str
    legal: tuple[Any, ...]
    cores: int


CASES: list[Case] = []


def case(
    rule: str, says: str, *inputs: Any, legal: Any = None, cores: int = 1
) -> Callable[[Kernel], Kernel]:
    """Decorator: a case with these inputs; `legal` replaces them for the legal twin."""

    def add(kernel: Kernel) -> Kernel:
        CASES.append(Case(rule, kernel, inputs, says, legal or inputs, cores))
        return kernel

    return add


def ones(*shape: int, dtype: Any = F32) -> Any:
    return np.ones(shape, dtype)


def sbuf(*shape: int, dtype: Any = nl.float32) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)


def psum(*shape: int, dtype: Any = nl.float32) -> Any:
    return nl.ndarray(shape, dtype=dtype, buffer=nl.psum)


def stored(tile: Any) -> Any:
    """A kernel's output, from a tile on the chip."""
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    if tile.buffer is nl.psum:
        copy = sbuf(*tile.shape, dtype=tile.dtype)
        nisa.tensor_copy(copy, tile)
        tile = copy
    nisa.dma_copy(out, tile)
    return out


def own_output(tile: Any) -> Any:
    """An output of which each of two cores writes its half."""
    out = nl.ndarray((2, *tile.shape), dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out[nl.program_id(0)], tile)
    return out


def add_one(tile: Any) -> None:
    nisa.tensor_scalar(tile, tile, nl.add, 1.0)


# --- device loops ---


@case(
    "lnc_loops", r"number 0 differs in its trip counts: core 0 .*\(3 trips\), core 1 .*\(5 trips\)",
    ones(4, 4), np.array([[3], [5]], np.int32),
    legal=(ones(4, 4), np.array([[5], [5]], np.int32)), cores=2,
)  # fmt: skip
def unequal_trips(x: Any, counts: Any, bad: bool) -> Any:
    tile, count, core = nl.load(x), sbuf(1, 1, dtype=nl.int32), nl.program_id(0)
    nisa.dma_copy(count, counts[core : core + 1])
    register = nisa.register_alloc()
    nisa.register_load(register, count)
    nl.fori_loop(0, register, lambda i: add_one(tile))
    return own_output(tile)


@case("lnc_loops", r"core 0 runs 1 device loops, core 1 0: .*no counterpart", ones(4, 4), cores=2)
def one_core_returns_early(x: Any, bad: bool) -> Any:
    tile, trips = nl.load(x), 3
    if nl.program_id(0) == 1:
        trips = 3 if not bad else 0
    if not bad or trips:
        nl.fori_loop(0, 3, lambda i: add_one(tile))
    return own_output(tile)


@case("lnc_loops", r"number 0 differs in its kind: .*fori_loop.*while_loop", ones(4, 4), cores=2)
def other_kind(x: Any, bad: bool) -> Any:
    tile, never = nl.load(x), nisa.register_alloc(0)
    if bad and nl.program_id(0):
        nl.while_loop(never, lambda register: register)
    else:
        nl.fori_loop(0, 0, lambda i: add_one(tile))
    return own_output(tile)


@case("lnc_loops", r"number 1 differs in its nesting", ones(4, 4), cores=2)
def other_nesting(x: Any, bad: bool) -> Any:
    tile = nl.load(x)

    def outer(i: Any) -> None:
        nl.fori_loop(0, 1, lambda j: add_one(tile))

    if bad and nl.program_id(0):
        with nki.strict(nested_loops="off"):
            nl.fori_loop(0, 1, outer)
    else:
        nl.fori_loop(0, 1, lambda i: add_one(tile))
        nl.fori_loop(0, 1, lambda i: add_one(tile))
    return own_output(tile)


@case("loop_psum", r"dst '.*' in PSUM was allocated outside nl.fori_loop", ones(4, 4, dtype=BF16))
def psum_of_outside(x: Any, bad: bool) -> Any:
    tile, total, outside = nl.load(x), nl.zeros((4, 4), nl.float32), psum(4, 4)

    def body(i: Any) -> None:
        inside = outside if bad else psum(4, 4)
        nisa.nc_matmul(inside, tile, tile, accumulate=False)
        nisa.tensor_tensor(total, total, inside, nl.add)

    nl.fori_loop(0, 3, body)
    return stored(total)


@case("loop_psum", r"is used by nl.fori_loop .* and by nl.fori_loop", ones(4, 4, dtype=BF16))
def psum_of_two_loops(x: Any, bad: bool) -> Any:
    tile, total, product = nl.load(x), nl.zeros((4, 4), nl.float32), psum(4, 4)
    nisa.nc_matmul(product, tile, tile, accumulate=False)
    nl.fori_loop(0, 2, lambda i: nisa.tensor_tensor(total, total, product, nl.add) and None)
    if bad:
        nl.fori_loop(0, 2, lambda i: nisa.tensor_tensor(total, total, product, nl.add) and None)
    return stored(total)


@case("nested_loops", r"nl.fori_loop inside nl.fori_loop of line", ones(4, 4))
def nested(x: Any, bad: bool) -> Any:
    tile = nl.load(x)

    def outer(i: Any) -> None:
        if bad:
            nl.fori_loop(0, 2, lambda j: add_one(tile))
        else:
            for _ in range(2):
                add_one(tile)

    nl.fori_loop(0, 2, outer)
    return stored(tile)


# --- PSUM ---


@case("psum_chains", r"chain 1 of .* after chain 2 began", ones(8, 8, dtype=BF16))
def chains_side_by_side(x: Any, bad: bool) -> Any:
    tile, result, sums = nl.load(x), sbuf(8, 2), psum(8, 2)
    for column in range(2):
        at = slice(column, column + 1)
        for part in range(3):
            nisa.nc_matmul(sums[:, at], tile, tile[:, :1], accumulate=part > 0)
        if not bad:
            nisa.tensor_copy(result[:, at], sums[:, at])
    if bad:
        nisa.tensor_copy(result, sums)
    return stored(result)


@case("psum_chains", r"chain 1 of .* after chain 2 began", ones(8, 8, dtype=BF16))
def chains_interleaved(x: Any, bad: bool) -> Any:
    """Legal: the second chain is one matmul."""
    tile, result, sums = nl.load(x), sbuf(8, 2), psum(8, 2)
    for part in range(2):
        for column in range(2):
            if bad or part == 0 or column == 0:
                at = slice(column, column + 1)
                nisa.nc_matmul(sums[:, at], tile, tile[:, :1], accumulate=part > 0)
    nisa.tensor_copy(result, sums)
    return stored(result)


@case("psum_chains", r"chain 1 of .* after chain 2 began", ones(8, 8, dtype=BF16))
def chain_read_while_the_next_has_begun(x: Any, bad: bool) -> Any:
    tile, result, sums = nl.load(x), sbuf(8, 2), psum(8, 2)
    first, second = sums[:, 0:1], sums[:, 1:2]
    nisa.nc_matmul(first, tile, tile[:, :1], accumulate=False)
    nisa.nc_matmul(first, tile, tile[:, :1], accumulate=True)
    if not bad:
        nisa.tensor_copy(result[:, 0:1], first)
    nisa.nc_matmul(second, tile, tile[:, :1], accumulate=False)
    if bad:
        nisa.tensor_copy(result[:, 0:1], first)
    nisa.nc_matmul(second, tile, tile[:, :1], accumulate=True)
    nisa.tensor_copy(result[:, 1:2], second)
    return stored(result)


@case("psum_bank", r"'.*' has 4096 bytes per partition; limit 2048", ones(4, 4))
def two_banks(x: Any, bad: bool) -> Any:
    tile = psum(4, 1024 if bad else 512)
    nisa.memset(tile, 0.0)
    return stored(tile[:, :4])


@case(
    "psum_bank", r"spans bytes 1024..3071 from the start of its PSUM bank; limit 2048", ones(4, 4)
)
def operand_over_a_bank(x: Any, bad: bool) -> Any:
    with nki.strict(psum_bank="off"):
        tile = psum(4, 2, 512)
    nisa.memset(tile[:, 0], 0.0)
    nisa.memset(tile[:, 1], 0.0)
    flat = tile.reshape((4, 1024))
    return stored(flat[:, 256:768] if bad else flat[:, 512:1024])


@case("psum_alignment", r"dtype bfloat16 starts at byte 2 of PSUM; allowed: multiples of 4",
      ones(8, 8, dtype=BF16))  # fmt: skip
def odd_start(x: Any, bad: bool) -> Any:
    tile, turned, first = nl.load(x), psum(8, 12, dtype=nl.bfloat16), 1 if bad else 2
    nisa.nc_transpose(turned[:, first : first + 8], tile)
    return stored(turned[:, first : first + 8])


@case("accumulate_none", r"accumulate=None .* an instruction has read", ones(4, 4, dtype=BF16))
def group_on_sums_that_were_read(x: Any, bad: bool) -> Any:
    tile, product = nl.load(x), psum(4, 4)
    for _ in range(2):
        nisa.nc_matmul(product, tile, tile, accumulate=None if bad else False)
        result = sbuf(4, 4)
        nisa.tensor_copy(result, product)
    return stored(result)


@case("accumulate_none", r"accumulate=None .* written by something other than a matmul",
      ones(4, 4, dtype=BF16))  # fmt: skip
def group_on_memset(x: Any, bad: bool) -> Any:
    tile, product = nl.load(x), psum(4, 4)
    nisa.memset(product, 0.0)
    nisa.nc_matmul(product, tile, tile, accumulate=None if bad else False)
    return stored(product)
