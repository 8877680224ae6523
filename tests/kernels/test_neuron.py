"""Device tensors under torch and JAX: stand-ins record what a framework would be called with."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from segattn.kernels import (
    DecodePlan,
    paged_decode,
    prepare_paged_decode,
    prepare_segmented_attention,
    segmented_attention,
)
from segattn.kernels.neuron import DeviceCaller, jax_caller, stand_in, torch_caller
from segattn.tests.kernels.cases import Array, normal

BF16 = np.dtype(ml_dtypes.bfloat16)


class DeviceTensor:
    """A tensor of a device that is not here: NumPy must not read it."""

    def __init__(self, values: Array) -> None:
        self.values, self.shape, self.dtype = values, values.shape, f"framework.{values.dtype}"

    def __array__(self, *arguments: Any, **options: Any) -> Array:
        raise AssertionError("read by the host")


class Framework:
    """Wraps kernels into handles that record their calls and run on the interpreter."""

    def __init__(self) -> None:
        self.wrapped: list[Any] = []
        self.calls: list[tuple[int, tuple[Any, ...]]] = []

    def wrap(self, kernel: Any) -> Any:
        self.wrapped.append(kernel)
        framework = self

        class Handle:
            grid = 1

            def __getitem__(self, grid: int) -> "Handle":
                handle = Handle()
                handle.grid = grid
                return handle

            def __call__(self, *arguments: Any) -> Any:
                framework.calls.append((self.grid, arguments))
                values = [getattr(each, "values", each) for each in arguments]
                return (kernel[2] if self.grid == 2 else kernel)(*values)

        return Handle()


def decode_step(seed: int) -> tuple[list[DeviceTensor], Array, Array]:
    """Q and caches on the device, block tables and lengths on the host."""
    rng = np.random.default_rng(seed)
    caches = (normal(rng, (9, 2, 16, 64), BF16) for _ in "kv")
    tensors = [DeviceTensor(each) for each in (normal(rng, (2, 4, 1, 64), BF16), *caches)]
    tables = rng.permutation(8).astype(np.int32).reshape(2, 4)
    return tensors, tables, np.array([50, 7], np.int32)


def decode_call(tensors: list[DeviceTensor]) -> tuple[Any, Array]:
    """The launch, prepared with stand-ins, and what it must give."""
    _, tables, lengths = decode_step(0)
    shapes: list[Any] = [stand_in(each) for each in tensors]
    values: list[Any] = [each.values for each in tensors]
    prepare: Any = prepare_paged_decode
    decode: Any = paged_decode
    return prepare(*shapes, tables, lengths), decode(*values, tables, lengths)


@pytest.mark.parametrize("lnc", [1, 2])
def test_layers_share_a_handle_and_the_lists_of_a_step(lnc: int) -> None:
    framework = Framework()
    uploads: list[Array] = []

    def put(array: Array) -> DeviceTensor:
        uploads.append(array)
        return DeviceTensor(array)

    caller = DeviceCaller(framework.wrap, put)
    tensors, tables, lengths = decode_step(0)
    q_, keys, values = (stand_in(each) for each in tensors)
    plan = caller.place(DecodePlan.build(q_, keys, values, tables, lengths, lnc=lnc))
    assert len(uploads) == 6
    for layer in range(3):
        tensors = decode_step(layer)[0]
        out = caller(prepare_paged_decode(q_, keys, values, plan=plan, scale=0.3), *tensors)
        q, k_cache, v_cache = (each.values for each in tensors)
        expected = paged_decode(q, k_cache, v_cache, tables, lengths, scale=0.3, lnc=lnc)
        np.testing.assert_array_equal(out, expected)
    assert len(framework.wrapped) == 1
    assert len(uploads) == 6
    assert [grid for grid, _ in framework.calls] == [lnc] * 3
    for _, arguments in framework.calls:
        given = [each for each in arguments if isinstance(each, DeviceTensor)]
        assert len(given) == 3 + 6
        assert not [each for each in arguments if isinstance(each, np.ndarray)]


def test_a_prefill_gives_its_flags_behind_its_output() -> None:
    rng = np.random.default_rng(1)
    framework = Framework()
    caller = DeviceCaller(framework.wrap, DeviceTensor)
    shapes = ((2, 128, 64), (1, 128, 64), (1, 128, 64), (9, 1, 16, 64), (9, 1, 16, 64))
    tensors = [DeviceTensor(normal(rng, shape, BF16)) for shape in shapes]
    table = np.arange(8, dtype=np.int32)
    q, k, v, k_cache, v_cache = (stand_in(each) for each in tensors)
    launch = prepare_segmented_attention(q, k, v, k_cache, v_cache, table, 100, 77, softmax="exact")
    out, flags = caller(launch, *tensors)
    q, k, v, k_cache, v_cache = (each.values for each in tensors)
    expected = segmented_attention(q, k, v, k_cache, v_cache, table, 100, 77, softmax="exact")
    np.testing.assert_array_equal(out, expected)
    assert not flags.any()


def test_a_tensor_of_another_shape_is_refused() -> None:
    tensors, _, _ = decode_step(0)
    caller = DeviceCaller(Framework().wrap, DeviceTensor)
    launch, _ = decode_call(tensors)
    tensors[0] = DeviceTensor(np.zeros((3, 4, 1, 64), BF16))
    with pytest.raises(ValueError, match=r"argument 0: shape \(3, 4, 1, 64\) must be \(2, 4, 1"):
        caller(launch, *tensors)


@pytest.mark.parametrize("keeps_handles", [True, False])
def test_torch_keeps_a_wrapped_handle_where_there_is_one(
    keeps_handles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, _, _ = decode_step(0)
    launch, expected = decode_call(tensors)
    arrays = [each.values for each in tensors]
    framework = Framework()
    moved: list[str] = []
    torch, neuron = ModuleType("torch"), ModuleType("torch_neuronx")

    def from_numpy(array: Array) -> Any:
        def to(device: str) -> Array:
            moved.append(device)
            return array

        return SimpleNamespace(to=to)

    torch.from_numpy = from_numpy  # type: ignore[attr-defined]
    if keeps_handles:
        neuron.wrap_nki = framework.wrap  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch_neuronx", neuron)
    np.testing.assert_array_equal(torch_caller()(launch, *arrays), expected)
    assert set(moved) == {"neuron"}
    assert len(framework.calls) == int(keeps_handles)


def test_jax_calls_the_kernel_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, _, _ = decode_step(0)
    launch, expected = decode_call(tensors)
    arrays = [each.values for each in tensors]
    numpy = ModuleType("jax.numpy")
    numpy.asarray = np.asarray  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", ModuleType("jax"))
    monkeypatch.setitem(sys.modules, "jax.numpy", numpy)
    out = jax_caller()(launch, *arrays)
    np.testing.assert_array_equal(out, expected)
