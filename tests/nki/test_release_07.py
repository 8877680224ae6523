"""What NKI 0.7 added to existing functions, removed, or says more strictly."""

from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki import compiler, simulator
from segattn.reference.nki.errors import NkiValidationError
from segattn.tests.nki.running import floats

nl: Any = nki.language  # the tests pass wrong types on purpose
nisa: Any = nki.isa
ncc: Any = nki.collectives
root: Any = nki
X = floats(4, 8)


@nki.jit
def degree_kernel(x: Any) -> Any:
    out = nl.ndarray((1, 2), dtype=nl.int32, buffer=nl.shared_hbm)
    if nl.program_id(0) == 0:
        nisa.register_store(out[:, 0], nisa.register_alloc(nl.num_programs()))
        nisa.register_store(out[:, 1], nisa.register_alloc(nl.program_ndim()))
    return out


@pytest.mark.parametrize(
    ("degree", "grid", "expected"),
    [
        (None, None, [1, 0]),
        (None, 1, [1, 1]),
        (None, 2, [2, 1]),
        ("1", None, [1, 0]),
        ("2", None, [2, 0]),
        ("2", 2, [2, 1]),
    ],
)
def test_the_variable_gives_the_number_of_cores(
    monkeypatch: pytest.MonkeyPatch, degree: str | None, grid: int | None, expected: list[int]
) -> None:
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    if degree is not None:
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", degree)
    kernel = degree_kernel if grid is None else degree_kernel[grid]
    assert kernel(X).tolist() == [expected]


@pytest.mark.parametrize(("degree", "grid"), [("1", 2), ("2", 1)])
def test_a_grid_of_another_degree_is_refused_by_its_error_code(
    monkeypatch: pytest.MonkeyPatch, degree: str, grid: int
) -> None:
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", degree)
    with pytest.raises(NkiValidationError, match=rf"\[{grid}\] with .*={degree}: .*NCC_EVRF066"):
        degree_kernel[grid](X)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "3")
    with pytest.raises(NkiValidationError, match="'3'; allowed on trn2: 1, 2"):
        degree_kernel(X)


@pytest.mark.parametrize("lnc", [1, 2])
def test_simulate_kernel_runs_a_kernel_or_a_function_on_so_many_cores(lnc: int) -> None:
    for kernel in (degree_kernel, degree_kernel.function):
        assert simulator.simulate_kernel(kernel, (X,), {}, lnc).tolist() == [[lnc, 1]]
    with pytest.raises(NkiValidationError, match="_lnc 3; allowed on trn2: 1, 2"):
        simulator.simulate_kernel(degree_kernel, (X,), {}, 3)


def test_the_records_of_nki_compiler_are_taken_and_nothing_else() -> None:
    rotations = compiler.AddressRotation
    config = compiler.CompileConfig(
        address_rotation=rotations.DISABLE, nki_alloc_fallback=False, barrier_check=True
    )
    assert {rotations.AUTO, rotations.ENABLE} == set(rotations) - {config.address_rotation}
    assert (config.prefetch_auto, config.nki_alloc_fallback) == (False, False)
    assert (config.dead_code_elim, config.non_ssa_legalization) == (None, None)
    assert config.barrier_check
    options = compiler.SpecializationConfig(allow_nested_config_override=True)
    assert options.allow_nested_config_override

    def returns(x: Any) -> Any:
        return x

    kernel = nki.jit(compile_config=config, specialization_config=options)(returns)
    np.testing.assert_array_equal(kernel(X), X)
    with pytest.raises(TypeError, match=r"no nki\.compiler\.CompileConfig"):
        nki.jit(compile_config={"barrier_check": True})  # type: ignore[arg-type]  # that is it
    with pytest.raises(TypeError, match="unroll"):
        compiler.CompileConfig(unroll=True)  # type: ignore[call-arg]  # what the test is about


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (lambda: nl.dynamic_range(4), r"nl.dynamic_range: removed in 0.7.0; use nl.fori_loop"),
        (lambda: nl.arange(4), r"nl.arange: removed in 0.2.0; use slices"),
        (lambda: nl.fp32, "nl.fp32 is not part of NKI 0.7; use nl.float32"),
        (lambda: nisa.tensor_copi, "nisa.tensor_copi is not part of NKI 0.7; use tensor_copy"),
        (lambda: nisa.no_such_thing_at_all, r"nisa.no_such_thing_at_all is not part of NKI 0.7$"),
        (lambda: ncc.all_gathers, "ncc.all_gathers is not part.*use all_gather"),
        (lambda: root.benchmark, r"nki.benchmark: absent since 0.2.0; use nki.simulate"),
    ],
)
def test_a_name_that_is_gone_or_misspelt_says_what_to_write(misuse: Any, text: str) -> None:
    with pytest.raises(AttributeError, match=text):
        misuse()


@pytest.mark.parametrize(
    ("attribute", "use"),
    [("T", "nisa.nc_transpose"), ("item", "nisa.scalar_load"), ("reshap", "reshape"), ("zz", "")],
)
def test_an_attribute_that_tensors_do_not_have_says_what_to_write(attribute: str, use: str) -> None:
    @nki.jit
    def kernel(x: Any) -> None:
        getattr(x, attribute)

    with pytest.raises(AttributeError, match=rf"NkiTensor\.{attribute} is not.*{use}.* \(at "):
        kernel(X)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda t: nisa.tensor_copy(t, t, mask=1), "removed in 0.2.0; use slices"),
        (lambda t: nisa.dma_copy(t, t, dst_rmw_op=1), "use nisa.dma_compute"),
        (lambda t: nisa.tensor_copy(t, t, engin=1), "use engine="),
        (lambda t: nl.load(t, dtyp=1), "use dtype="),
    ],
)
def test_a_keyword_that_is_gone_or_misspelt_says_what_to_write(call: Any, hint: str) -> None:
    @nki.jit
    def kernel(x: Any) -> None:
        call(nl.load(x))

    with pytest.raises(TypeError, match=rf"unexpected keyword.*{hint}.* \(at .*release_07.py"):
        kernel(X)


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda x, t: nisa.vector_engine, "nisa.engine.vector"),
        (lambda x, t: nl.tile_size.psum_fmax, "psum_bank_fmax"),
        (lambda x, t: nl.tile_size.total_available_sbuf_size, "sbuf_fmax_bytes"),
        (
            lambda x, t: nisa.activation_reduce(t, nl.exp, t, nl.add, nl.zeros((4, 1), nl.float32)),
            "use nisa.activation with",
        ),
        (lambda x, t: nki.jit(lambda x: x, mode="auto"), "leave it out"),
    ],
)
def test_deprecated_names_run_and_say_what_to_write(call: Any, instead: str) -> None:
    @nki.jit
    def kernel(x: Any) -> None:
        call(x, nl.load(x))

    kernel(X)
    with nki.strict(deprecated="error"), pytest.raises(NkiValidationError, match=instead):
        kernel(X)


def test_the_old_names_of_engines_are_the_members() -> None:
    assert nisa.tensor_engine is nisa.engine.tensor
    assert nisa.vector_engine is nisa.engine.vector
    assert nisa.scalar_engine is nisa.engine.scalar
    assert nisa.gpsimd_engine is nisa.engine.gpsimd
    assert nisa.unknown_engine is nisa.engine.unknown


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("op", ["add", "maximum", "minimum", "multiply"])
def test_scalar_tensor_tensor_reduces_its_rows(op: str, chained: bool) -> None:
    reduce = {"add": np.add, "maximum": np.maximum, "minimum": np.minimum, "multiply": np.multiply}

    @nki.jit
    def kernel(x: Any, y: Any) -> Any:
        out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        sums = nl.ndarray((4, 1), dtype=nl.float32, buffer=nl.shared_hbm)
        a, b = nl.load(x), nl.load(y)
        dst, result = nl.ndarray((4, 8), nl.float32), nl.ndarray((4, 1), nl.float32)
        operands = (dst, a, nl.multiply, 2.0, nl.add, b)
        token = getattr(nl, op)
        nisa.scalar_tensor_tensor(*operands, reduce_op=token, reduce_res=result)
        if chained:
            nisa.scalar_tensor_tensor(
                *operands, reduce_op=token, reduce_res=result, reduce_cmd=nisa.reduce_cmd.reduce
            )
        nisa.dma_copy(out, dst)
        nisa.dma_copy(sums, result)
        return out, sums

    x, y = (np.random.default_rng(s).integers(1, 3, (4, 8)).astype(np.float32) for s in (1, 2))
    out, sums = kernel(x, y)
    expected = 2 * x + y
    np.testing.assert_array_equal(out, expected)
    rows = reduce[op].reduce(np.tile(expected, 1 + chained), axis=1, keepdims=True)
    np.testing.assert_allclose(sums, rows, rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            lambda t, p: nisa.scalar_tensor_tensor(
                t, t, nl.add, 1.0, nl.add, t, reduce_op=nl.subtract
            ),
            "reduce_op nl.subtract; allowed: add",
        ),
        (
            lambda t, p: nisa.scalar_tensor_tensor(
                t, t, nl.add, 1.0, nl.add, t,
                reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.load_reduce,
            ),
            "allowed: reset_reduce, reduce",
        ),
        (
            lambda t, p: nisa.activation(t, nl.exp, t, engine=nisa.engine.gpsimd),
            "allowed on trn2: scalar",
        ),
        (
            lambda t, p: nisa.tensor_copy_predicated(t, nl.copy(t), p, reverse_pred=True),
            "reverse_pred=True with a tile as src",
        ),
        (lambda t, p: nisa.tensor_copy_predicated(t, 1, p), "a scalar must be a float"),
        (lambda t, p: nisa.tensor_copy_predicated(p, 1.0, p), "a scalar must be a int"),
        (
            lambda t, p: nisa.tensor_copy_predicated(
                nl.ndarray((4, 2, 1, 2, 2), nl.float32), 1.0, p.reshape((4, 2, 1, 2, 2))
            ),
            "operand dst has 4 free dimensions; limit 3",
        ),
        (
            lambda t, p: nisa.tensor_scalar_reduce(
                t, t.reshape((4, 2, 1, 2, 2)), nl.add, 1.0, nl.add
            ),
            "operand data has 4 free dimensions; limit 3",
        ),
        (lambda t, p: nl.NkiTensor((4, 8), "float32", t.storage, address=(0, 0)), "its own"),
    ],
)  # fmt: skip
def test_the_texts_of_0_7_are_kept(body: Any, text: str) -> None:
    @nki.jit
    def kernel(x: Any) -> None:
        body(nl.load(x), nl.ones((4, 8), nl.uint8))

    with pytest.raises(NkiValidationError, match=text):
        kernel(X)


def test_memset_takes_four_free_dimensions() -> None:
    @nki.jit
    def kernel() -> Any:
        out = nl.ndarray((2, 16), dtype=nl.float32, buffer=nl.shared_hbm)
        tile = nl.ndarray((2, 2, 2, 2, 2), nl.float32)
        nisa.memset(tile, 3.0)
        nisa.dma_copy(out, tile)
        return out

    np.testing.assert_array_equal(kernel(), np.full((2, 16), 3))


def test_hbm_tensors_have_addresses_that_do_not_overlap() -> None:
    @nki.jit
    def kernel(second: Any) -> None:
        nl.ndarray((4, 8), nl.float32, nl.hbm, "first", address=(256,))
        nl.ndarray((4, 8), nl.float32, nl.hbm, "second", address=second)

    for start in (128, 384):
        kernel((start,))
    for start in (255, 129, 383):
        with pytest.raises(NkiValidationError, match=r"'second' at bytes .* overlaps 'first'"):
            kernel((start,))
    with pytest.raises(NkiValidationError, match=r"allowed: \(first byte,\)"):
        kernel((0, 8))
