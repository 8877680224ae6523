"""Further forms of illegal kernels: each operand of each instruction, other ways to one end."""

from collections.abc import Callable
from typing import Any

import numpy as np

from segattn.reference import nki
from segattn.tests.nki.field_rule_cases import BF16, add_one, case, ones, psum, sbuf, stored

nl, nisa = nki.language, nki.isa

ROWS = np.arange(4, dtype=np.int32).reshape(4, 1)
AT = np.array([[2]], np.int32)


def each(rule: str, says: str, *inputs: Any, forms: dict[str, Callable[..., Any]]) -> None:
    """One case for each form: form(tile, result, chosen), `chosen` being what `part` gives."""
    for name, form in forms.items():

        def kernel(x: Any, *rest: Any, form: Callable[..., Any] = form) -> Any:
            *more, bad = rest
            tile, result = nl.load(x), nl.ones((32, 8), nl.float32)
            form(tile, result, *PARTS[rule](tile, bad, *more))
            return stored(result)

        kernel.__name__ = f"{rule}_{name}"
        case(rule, says, *inputs)(kernel)


def run_time_part(tile: Any, bad: bool, at: Any) -> tuple[Any, Any]:
    """Eight columns and one column of the first 32 partitions from column 2 on."""
    if not bad:
        return tile[0:32, 2:10], tile[0:32, 2:3]
    pattern, index = [[16, 32]], nl.load(at)
    wide = tile.ap([*pattern, [1, 8]], scalar_offset=index, indirect_dim=1)
    return wide, tile.ap([*pattern, [1, 1]], scalar_offset=index, indirect_dim=1)


def part_of_a_quadrant(tile: Any, bad: bool) -> tuple[Any, Any]:
    start = 32 if bad else 0
    return tile[start : start + 32, 0:8], tile[start : start + 32, 0:1]


def column_of_a_dtype(tile: Any, bad: bool) -> tuple[Any]:
    column = sbuf(32, 1, dtype=nl.bfloat16 if bad else nl.float32)
    nisa.memset(column, 1.0)
    return (column,)


PARTS: dict[str, Callable[..., Any]] = {
    "dynamic_operand": run_time_part,
    "operand_partitions": part_of_a_quadrant,
    "column_dtype": column_of_a_dtype,
    "vector_column": column_of_a_dtype,
}

each(
    "dynamic_operand", r"has a run-time offset", ones(64, 16), AT,
    forms={
        "data": lambda t, r, wide, column: nisa.activation(r, nl.exp, wide),
        "bias": lambda t, r, wide, column: nisa.activation(r, nl.exp, r, bias=column),
        "scale": lambda t, r, wide, column: nisa.activation(r, nl.exp, r, scale=column),
        "dst": lambda t, r, wide, column: nisa.tensor_scalar(wide, r, nl.add, 1.0),
        "operand0": lambda t, r, wide, column: nisa.tensor_scalar(r, r, nl.add, column),
        "operand1": lambda t, r, wide, column: nisa.tensor_scalar(
            r, r, nl.add, 1.0, op1=nl.multiply, operand1=column
        ),
        "data2": lambda t, r, wide, column: nisa.tensor_tensor(r, r, wide, nl.add),
        "reduce_res": lambda t, r, wide, column: nisa.scalar_tensor_tensor(
            r, r, nl.add, 1.0, nl.multiply, r, reduce_op=nl.add, reduce_res=column
        ),
        "sum": lambda t, r, wide, column: nisa.tensor_reduce(column, nl.add, r, axis=1),
        "fill": lambda t, r, wide, column: nisa.memset(wide, 0.0),
        "counts": lambda t, r, wide, column: nisa.iota(wide, [[1, 8]]),
        "select": lambda t, r, wide, column: nisa.affine_select(r, [[1, 8]], 0, wide, 0.0),
        "scan": lambda t, r, wide, column: nisa.tensor_tensor_scan(
            r, r, r, column, nl.add, nl.multiply
        ),
        "bound": lambda t, r, wide, column: nisa.range_select(
            r, r, nl.greater_equal, nl.less, t[0:32, 0:1], column
        ),
        "best": lambda t, r, wide, column: nisa.max8(r, wide),
        "transpose": lambda t, r, wide, column: nisa.nc_transpose(sbuf(8, 32), wide),
        "function": lambda t, r, wide, column: nl.exp(wide),
    },
)  # fmt: skip

each(
    "operand_partitions", r"start at different partitions", ones(64, 16),
    forms={
        "scale": lambda t, r, wide, column: nisa.activation(
            r, nl.exp, t[0:32, 0:8], bias=t[0:32, 0:1], scale=column
        ),
        "operand1": lambda t, r, wide, column: nisa.tensor_scalar(
            r, t[0:32, 0:8], nl.add, t[0:32, 0:1], op1=nl.multiply, operand1=column
        ),
        "bits": lambda t, r, wide, column: nisa.tensor_scalar(
            r.view(nl.int32), t[0:32, 0:8].view(nl.int32), nl.bitwise_or, column.view(nl.int32)
        ),
        "third": lambda t, r, wide, column: nisa.scalar_tensor_tensor(
            r, t[0:32, 0:8], nl.add, t[0:32, 0:1], nl.multiply, wide
        ),
        "initial": lambda t, r, wide, column: nisa.tensor_tensor_scan(
            r, t[0:32, 0:8], t[0:32, 0:8], column, nl.add, nl.multiply
        ),
        "bound1": lambda t, r, wide, column: nisa.range_select(
            r, t[0:32, 0:8], nl.greater_equal, nl.less, t[0:32, 0:1], column
        ),
        "on_false": lambda t, r, wide, column: nisa.select_reduce(
            r, nl.ones((32, 8), nl.uint8), t[0:32, 0:8], column
        ),
    },
)  # fmt: skip

each(
    "column_dtype", r"has dtype bfloat16; allowed: float32", ones(32, 8),
    forms={
        "operand1": lambda t, r, column: nisa.tensor_scalar(
            r, t, nl.add, 1.0, op1=nl.multiply, operand1=column
        ),
    },
)  # fmt: skip

each(
    "vector_column", r"has dtype bfloat16; allowed: float32", ones(32, 8),
    forms={
        "third": lambda t, r, column: nisa.scalar_tensor_tensor(
            r, t, nl.add, column, nl.multiply, t
        ),
        "initial": lambda t, r, column: nisa.tensor_tensor_scan(
            r, t, t, column, nl.add, nl.multiply
        ),
        "on_false": lambda t, r, column: nisa.select_reduce(
            r, nl.ones((32, 8), nl.uint8), t, column
        ),
    },
)  # fmt: skip


@case("accumulate_none", r"written by something other than a matmul", ones(8, 8, dtype=BF16))
def group_on_a_part_that_was_copied(x: Any, bad: bool) -> Any:
    tile, product = nl.load(x), psum(8, 8)
    nisa.tensor_copy(product[:, 0:4], tile[:, 0:4])
    nisa.nc_matmul(product, tile, tile, accumulate=None if bad else False)
    return stored(product)


@case("loop_dge", r"dma_compute: dge_mode.none in the body", ones(4, 8))
def static_sum_in_a_loop(x: Any, bad: bool) -> Any:
    """dma_compute without a vector_offset has descriptors of the host."""
    tile, total = nl.load(x), nl.zeros((4, 8), nl.float32)

    def body(i: Any) -> None:
        if bad:
            nisa.dma_compute(total, [tile, x], reduce_op=nl.add)
        else:
            nisa.tensor_tensor(total, tile, tile, nl.add)

    nl.fori_loop(0, 2, body)
    return stored(total)


@case("ap_view", r"on a view of 'x' \(shape \(4, 8\) from element 0\)", ones(8, 4))
def pattern_on_permuted_dimensions(x: Any, bad: bool) -> Any:
    whole = x.permute((1, 0)) if bad else x
    return stored(nl.load(whole.ap([[1, 4], [4, 8]])))


def after_a_copy(name: str, copy: Callable[..., Any]) -> None:
    """On two cores, a scatter-add after `copy` into the core's half of `out`."""

    def kernel(x: Any, index: Any, bad: bool) -> Any:
        core = nl.program_id(0)
        out = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        other = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        rows = nl.load(index[core])
        copy(out, rows, nl.zeros((4, 8), nl.float32), 4 * core)
        nisa.core_barrier(other if bad else out, (0, 1))
        target = out.ap([[8, 4], [1, 8]], vector_offset=rows)
        nisa.dma_compute(target, [target, nl.load(x)], reduce_op=nl.add)
        return out

    kernel.__name__ = f"scatter_add_after_{name}"
    index = np.stack([ROWS, ROWS + 4])
    says = "scatter-add to 'out', into which the dma_copy"
    case("scatter_add_after_copy", says, ones(4, 8), index, cores=2)(kernel)


def copy_to_a_register(out: Any, rows: Any, zeros: Any, first: int) -> None:
    register = nisa.register_alloc(first)
    nisa.dma_copy(out[nl.ds(register, 4)], zeros)


after_a_copy("another_barrier", lambda out, rows, zeros, at: nl.store(out[at : at + 4], zeros))
after_a_copy("run_time_copy", copy_to_a_register)
after_a_copy("sum", lambda out, rows, zeros, at: nisa.dma_compute(
    out[at : at + 4], [zeros, zeros], reduce_op=nl.add
))  # fmt: skip
after_a_copy("scatter", lambda out, rows, zeros, at: nisa.dma_copy(
    out.ap([[8, 4], [1, 8]], vector_offset=rows), zeros
))  # fmt: skip


@case("integer_reduce", r"operand reduce_res .* has dtype int32; allowed: float", ones(4, 8))
def integer_sum_of_two_tiles(x: Any, bad: bool) -> Any:
    tile, total = nl.load(x), sbuf(4, 1, dtype=nl.int32 if bad else nl.float32)
    nisa.scalar_tensor_tensor(
        tile, tile, nl.add, 1.0, nl.multiply, tile, reduce_op=nl.add, reduce_res=total
    )
    return stored(total)


@case("square_sum", r"nisa.activation: op nl.square with a reduction", ones(4, 8))
def sum_of_squares_by_activation(x: Any, bad: bool) -> Any:
    tile, total = nl.load(x), sbuf(4, 1)
    reduction = {"reduce_op": nl.add, "reduce_res": total}
    nisa.activation(
        tile, nl.square if bad else nl.copy, tile, reduce_cmd=nisa.reduce_cmd.reset_reduce,
        **reduction,
    )  # fmt: skip
    return stored(total)


@case("tile_rank", r"\.ap of .* has 6 dimensions; allowed: 2..5", ones(8, 64))
def pattern_of_six_dimensions(x: Any, bad: bool) -> Any:
    tile, copy = nl.load(x), sbuf(8, 64)
    inner = [[8, 2], [4, 2], [1, 4]] if bad else [[8, 2], [1, 8]]
    nisa.dma_copy(copy, tile.ap([[64, 8], [32, 2], [16, 2], *inner]))
    return stored(copy)


@case("hbm_rank", r"argument 'x' of shape \(8, 2, 2, 2, 2, 4\) has 6 dimensions",
      ones(8, 2, 2, 2, 2, 4), legal=(ones(8, 2, 2, 2, 8),))  # fmt: skip
def argument_of_six_dimensions(x: Any, bad: bool) -> Any:
    return stored(nl.load(x.reshape((8, 64))))


@case("dma_reshape", r"dma_compute: .* the 8 partitions of '.*' cut through rows", ones(4, 8))
def sum_of_another_shape(x: Any, bad: bool) -> Any:
    tile = sbuf(8, 4) if bad else sbuf(4, 2, 4)
    nisa.dma_compute(tile, [x, nl.load(x)], reduce_op=nl.add)
    return stored(tile)


@case("nested_loops", r"nl.while_loop inside nl.fori_loop of line", ones(4, 4))
def loop_without_trips_in_a_loop(x: Any, bad: bool) -> Any:
    tile, never = nl.load(x), nisa.register_alloc(0)

    def outer(i: Any) -> None:
        if bad:
            nl.while_loop(never, lambda register: register)
        add_one(tile)

    nl.fori_loop(0, 2, outer)
    return stored(tile)
