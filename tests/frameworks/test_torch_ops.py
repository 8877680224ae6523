"""torch.ops.segattn.*: schemas, fake kernels and full-graph compilation; NumPy gives the values."""

import copy
import shutil
from typing import Any

import numpy as np
import pytest
import torch

import segattn.kernels
import segattn.kernels.torch_ops  # registers the operators
from segattn.kernels.arrays import array_kind
from segattn.tests.frameworks.calls import BF16, Call, every_call, make_call
from segattn.tests.kernels.prefill_call import prefill_arrays

NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="inductor needs a C++ compiler"
)


def tensor(value: Any) -> Any:
    """A tensor with memory of its own for an array; anything else as it is."""
    if not isinstance(value, np.ndarray):
        return value
    return array_kind(tensor=torch.empty(0)).give(value.copy())


def bits(value: Any) -> bytes:
    """The bytes of a tensor or an array; none of None."""
    if value is None:
        return b""
    if isinstance(value, torch.Tensor):
        value = array_kind(tensor=value).read(value)
    return bytes(value.tobytes())


def tensors(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call for torch."""
    options = {name: tensor(value) for name, value in call.options.items()}
    return [tensor(value) for value in call.arguments], options


def operator(kernel: str) -> Any:
    """The operator of a kernel."""
    return getattr(torch.ops.segattn, kernel)


def expected(call: Call) -> tuple[bytes | None, bytes, bytes]:
    """Attention and caches of the host function on NumPy arrays."""
    arguments: list[Any] = copy.deepcopy(call.arguments)
    result = getattr(segattn.kernels, call.kernel)(*arguments, **call.options)
    if isinstance(result, tuple):
        result = result[0] if len(result) == 3 else None
    first, second = (bits(arguments[place]) for place in call.caches)
    return None if result is None else bits(result), first, second


@every_call
def test_an_operator_computes_what_its_host_function_does(
    kernel: str, variant: dict[str, Any]
) -> None:
    call = make_call(kernel, **variant)
    arguments, options = tensors(call)
    out = operator(kernel)(*arguments, **options)
    attention, *caches = expected(call)
    assert (None if out is None else bits(out)) == attention
    assert [bits(arguments[place]) for place in call.caches] == caches


@every_call
def test_schema_fake_kernel_and_autograd_pass_opcheck(kernel: str, variant: dict[str, Any]) -> None:
    call = make_call(kernel, **variant)
    arguments, options = tensors(call)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks.append("test_aot_dispatch_dynamic")
    if variant.get("fp8"):
        checks.remove("test_schema")  # torch has no allclose for fp8, with which it compares
    results = torch.library.opcheck(
        operator(kernel).default, tuple(arguments), options, test_utils=checks
    )
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("kernel", ["segmented_attention", "padded_prefill"])
def test_lengths_may_be_tensors(kernel: str) -> None:
    call = make_call(kernel, np.float32)
    first = len(call.arguments) - (2 if kernel == "segmented_attention" else 1)
    lengths = [np.array([[number]], np.int32) for number in call.arguments[first:]]
    other = Call(kernel, [*call.arguments[:first], *lengths])
    arguments, _ = tensors(other)
    results = torch.library.opcheck(operator(kernel).tensor, tuple(arguments))
    assert set(results.values()) == {"SUCCESS"}
    assert bits(operator(kernel)(*arguments)) == expected(call)[0]


def test_only_the_caches_that_are_written_are_declared_so() -> None:
    def written(kernel: str) -> list[str]:
        arguments = operator(kernel).default._schema.arguments
        return [each.name for each in arguments if each.alias_info and each.alias_info.is_write]

    assert written("write_kv_cache") == written("padded_prefill") == ["k_cache", "v_cache"]
    assert written("segmented_attention") == written("paged_decode") == []


def step(
    q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, table: Any, lengths: Any,
    prior: Any, count: Any,
) -> Any:  # fmt: skip
    """What a layer does with the operators: write, attend, decode over what was written."""
    ops = torch.ops.segattn
    ops.write_kv_cache(k * 2, v, k_cache, v_cache, slots)
    out = ops.segmented_attention(q + 1, k * 2, v, k_cache, v_cache, table, prior, count)
    last = ops.paged_decode(q[None, :, :1] * 2, k_cache, v_cache, table[None], lengths)
    again = ops.padded_prefill(q, k, v, k_cache, v_cache, slots, count)
    return out.sum(0) + again.sum(0), last, v_cache.float().sum()


def step_arguments(dtype: Any, prior: int, count: int) -> list[Any]:
    """Arguments of `step`: `prior` tokens in blocks 1 and 0, `count` written behind them."""
    arrays = prefill_arrays(dtype)
    caches = [np.random.default_rng(1).standard_normal((2, 1, 16, 64)).astype(dtype) for _ in "kv"]
    slots = np.full(128, -1, np.int32)
    positions = np.arange(prior, prior + count)
    slots[:count] = (positions // 16 == 0) * 16 + positions % 16
    table, lengths = np.array([1, 0], np.int32), np.array([prior + count], np.int32)
    own = [arrays["q"], arrays["k"], arrays["v"], *caches, slots, table, lengths]
    return [*map(tensor, own), prior, count]


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("aot_eager", np.float32),
        ("aot_eager", BF16),
        pytest.param("inductor", BF16, marks=NEEDS_COMPILER),
    ],
)
def test_a_layer_compiles_as_one_full_graph_and_writes_its_caches(backend: str, dtype: Any) -> None:
    torch.compiler.reset()
    plain, compiled = step_arguments(dtype, 7, 5), step_arguments(dtype, 7, 5)
    wanted = step(*plain)
    before = bits(compiled[3])
    results = torch.compile(step, fullgraph=True, backend=backend)(*compiled)
    for result, want in zip(results, wanted, strict=True):
        torch.testing.assert_close(result, want, rtol=1e-2, atol=1e-2)
    assert [bits(each) for each in compiled[3:5]] == [bits(each) for each in plain[3:5]]
    assert bits(compiled[3]) != before


@pytest.mark.parametrize(("as_tensor", "graphs"), [(True, 1), (False, 2)])
def test_lengths_do_not_make_a_graph_each(as_tensor: bool, graphs: int) -> None:
    torch.compiler.reset()
    compiled_graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal compiled_graphs
        compiled_graphs += 1
        return graph.forward

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for prior, count in ((7, 5), (9, 3), (12, 6), (2, 16)):
        arguments = step_arguments(np.float32, prior, count)
        wanted = step(*step_arguments(np.float32, prior, count))
        if as_tensor:
            arguments[8:] = [
                torch.tensor([[number]], dtype=torch.int32) for number in (prior, count)
            ]
        for result, want in zip(compiled(*arguments), wanted, strict=True):
            torch.testing.assert_close(result, want)
    assert compiled_graphs == graphs


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_errors_keep_their_type_and_nothing_is_written(backend: str | None) -> None:
    torch.compiler.reset()
    call = make_call("write_kv_cache", np.float32)
    call.arguments[4][3] = 10**6
    arguments, _ = tensors(call)

    def write(*tensors: Any) -> Any:
        torch.ops.segattn.write_kv_cache(*tensors)
        return tensors[2].sum()

    function = write if backend is None else torch.compile(write, fullgraph=True, backend=backend)
    with pytest.raises(ValueError, match=r"slot_mapping\[3\]=1000000: must be -1 or within"):
        function(*arguments)
    assert [bits(each) for each in arguments] == [bits(each) for each in call.arguments]


def test_the_bounded_softmax_that_fails_its_check_raises_through_the_operator() -> None:
    call = make_call("padded_prefill", BF16)
    call.arguments[1][:, 0] *= np.asarray(1000, BF16)
    arguments, _ = tensors(call)
    with pytest.raises(FloatingPointError, match="softmax='bounded'"):
        torch.ops.segattn.padded_prefill(*arguments, softmax="bounded")
    assert [bits(each) for each in arguments[:6]] == [bits(each) for each in call.arguments[:6]]


def test_a_gradient_is_refused_instead_of_being_wrong() -> None:
    arguments, _ = tensors(make_call("paged_decode", np.float32))
    arguments[0].requires_grad_()
    out = torch.ops.segattn.paged_decode(*arguments)
    with pytest.raises(RuntimeError, match=r"paged_decode.*no autograd formula"):
        out.sum().backward()


def test_on_the_meta_device_only_shapes_are_computed() -> None:
    arguments, _ = tensors(make_call("paged_decode", BF16))
    out = torch.ops.segattn.paged_decode(*[each.to("meta") for each in arguments])
    assert (out.device.type, out.dtype) == ("meta", torch.bfloat16)
    assert out.shape == arguments[0].shape


@pytest.mark.parametrize("name", ["k", "v_scale"])
def test_a_single_tensor_on_the_meta_device_is_refused(name: str) -> None:
    """Torch would take the fake kernel for it and return memory that nobody wrote."""
    arguments = {
        name: torch.from_numpy(array) for name, array in prefill_arrays(np.float32).items()
    }
    arguments["v_scale"] = torch.ones(1)
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"{name}: device meta must be cpu as q"):
        torch.ops.segattn.padded_prefill(**arguments, num_tokens=5)
