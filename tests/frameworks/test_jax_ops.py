"""JAX functions under jit and vmap; NumPy gives the values."""

import copy
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

import segattn.kernels
from segattn.kernels import jax_ops
from segattn.kernels.jax_ops import COMPILED_IN
from segattn.tests.frameworks.calls import BF16, Call, every_call, make_call


def expected(call: Call) -> Any:
    """Results of the host function on NumPy arrays."""
    arguments: list[Any] = copy.deepcopy(call.arguments)
    return getattr(segattn.kernels, call.kernel)(*arguments, **call.options)


def jitted(call: Call) -> Any:
    """The kernel's JAX function under jit, everything traced that may be."""
    fixed = {name: value for name, value in call.options.items() if name in COMPILED_IN}
    return jax.jit(partial(getattr(jax_ops, call.kernel), **fixed))


def arrays(call: Call) -> tuple[list[Any], dict[str, Any]]:
    """The traced arguments, caches in memory of their own."""
    traced = {name: value for name, value in call.options.items() if name not in COMPILED_IN}
    positional, named = jax.tree.map(
        lambda value: jax.numpy.array(value, copy=True), (call.arguments, traced)
    )
    return positional, named


def assert_same(results: Any, wanted: Any) -> None:
    """The same bytes in the same structure."""
    for result, want in zip(jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True):
        assert isinstance(result, jax.Array)
        assert result.dtype == want.dtype
        assert np.asarray(result).tobytes() == want.tobytes()


@every_call
def test_a_jitted_call_computes_what_the_host_function_does_and_leaves_its_arguments(
    kernel: str, variant: dict[str, Any]
) -> None:
    call = make_call(kernel, **variant)
    positional, named = arrays(call)
    assert_same(jitted(call)(*positional, **named), expected(call))
    first, second = call.caches
    assert_same(positional[first : second + 1], call.arguments[first : second + 1])


def test_one_compilation_serves_every_length() -> None:
    call = make_call("segmented_attention", np.float32)
    traces = 0

    def attend(*arguments: Any) -> Any:
        nonlocal traces
        traces += 1
        return jax_ops.segmented_attention(*arguments)

    compiled = jax.jit(attend)
    for prior, count in ((150, 40), (7, 1), (0, 40)):
        call.arguments[-2:] = (np.array([[number]], np.int32) for number in (prior, count))
        assert_same(compiled(*arrays(call)[0]), expected(call))
    assert traces == 1


def test_caches_pass_through_the_steps_of_one_jitted_function() -> None:
    prefill = make_call("padded_prefill", BF16)
    decode = make_call("paged_decode", BF16)
    tables, lengths = np.array([[1], [0]], np.int32), np.array([30, 32], np.int32)
    queries = decode.arguments[0][:2]

    def both(module: Any, arguments: Any, queries: Any, tables: Any, lengths: Any) -> Any:
        out, k_cache, v_cache = module.padded_prefill(*arguments)
        return out, module.paged_decode(queries, k_cache, v_cache, tables, lengths)

    slots = np.full(128, -1, np.int32)
    slots[:40] = [*range(32, 62), *range(10)]
    for cache in prefill.caches:
        prefill.arguments[cache] = np.ones_like(prefill.arguments[cache])
    prefill.arguments[5] = slots
    step = jax.jit(partial(both, jax_ops))
    results = step(arrays(prefill)[0], queries, tables, lengths)
    wanted = both(segattn.kernels, copy.deepcopy(prefill.arguments), queries, tables, lengths)
    assert_same(results, wanted)


def test_vmap_runs_the_kernel_once_per_element() -> None:
    call = make_call("paged_decode", np.float32)
    positional, _ = arrays(call)
    queries = jax.numpy.stack([positional[0] * factor for factor in (1, 2, 3)])
    lengths = np.array([[70, 0, 33], [1, 2, 3], [0, 0, 0]], np.int32)
    mapped = jax.vmap(jax_ops.paged_decode, in_axes=(0, None, None, None, 0))
    outs = mapped(queries, *positional[1:4], jax.numpy.asarray(lengths))
    for i in range(3):
        call.arguments[0], call.arguments[4] = np.asarray(queries[i]), lengths[i]
        assert_same([outs[i]], [expected(call)])


def test_without_tracing_a_rejected_argument_is_a_value_error() -> None:
    call = make_call("write_kv_cache", np.float32)
    call.arguments[4][3] = 10**6
    with pytest.raises(ValueError, match=r"^slot_mapping\[3\]=1000000: must be -1 or within"):
        jax_ops.write_kv_cache(*arrays(call)[0])


def test_under_jit_the_message_of_a_rejected_argument_is_kept() -> None:
    call = make_call("write_kv_cache", np.float32)
    call.arguments[4][3] = 10**6
    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match=r"slot_mapping\[3\]=1000000: must be -1 or"
    ):
        jax.block_until_ready(jitted(call)(*arrays(call)[0]))


def test_the_host_functions_name_what_works_while_jax_traces() -> None:
    call = make_call("paged_decode", np.float32)
    with pytest.raises(TypeError, match=r"segattn\.kernels\.jax_ops"):
        jax.jit(segattn.kernels.paged_decode)(*arrays(call)[0])


def test_large_caches_do_not_block_the_callback() -> None:
    call = make_call("write_kv_cache", BF16)
    for cache in call.caches:
        call.arguments[cache] = np.zeros((4_000, 2, 32, 64), BF16)
    for _ in range(3):
        assert_same(jitted(call)(*arrays(call)[0]), expected(call))
