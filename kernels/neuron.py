"""Our kernels on tensors that are on a Neuron device, under torch or JAX.

The host functions take arrays that NumPy can read. On a device the queries, keys, values and caches
stay where they are: a call is prepared with `stand_in`s of their shapes, and a `DeviceCaller`
launches it with the tensors themselves in front.

    caller = torch_caller()                       # once per process: it keeps the handles
    plan = caller.place(DecodePlan.build(*map(stand_in, (q, k_cache, v_cache)), tables, lengths))
    launch = prepare_paged_decode(*map(stand_in, (q, k_cache, v_cache)), plan=plan)
    out = caller(launch, q, k_cache, v_cache)     # in every layer

Results are those of the kernel, in its order: prefill gives flags behind its output, not 0 where
softmax="bounded" or "auto" left the accurate range; launch it with softmax="exact" then.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np

from .arrays import Array
from .launch import Launch
from .launch_decode import DecodePlan
from .plan.decode_plan import DecodeLists


def stand_in(tensor: Any) -> Array:
    """A NumPy array of a tensor's shape and dtype, whose values are not there.

    The dtype is known by its name, as torch and JAX print it. AttributeError for an unknown one.
    """
    name = str(tensor.dtype).rpartition(".")[2]
    return np.empty(tuple(tensor.shape), np.dtype(getattr(ml_dtypes, name, None) or name))


class DeviceCaller:
    """Launches kernels on device tensors, through one handle per kernel: each new one compiles.

    `wrap` makes a handle of a `@nki.jit` kernel, `put` a device tensor of a NumPy array.
    """

    def __init__(self, wrap: Callable[[Any], Any], put: Callable[[Array], Any]) -> None:
        self._wrap, self._put = wrap, put
        self._handles: dict[Any, Any] = {}

    def __call__(self, launch: Launch[Any], *tensors: Any) -> Any:
        """What the kernel returns; `tensors` are its first arguments, in its order.

        ValueError for a tensor of another shape than the launch was prepared for.
        """
        for number, (tensor, prepared) in enumerate(zip(tensors, launch.arrays, strict=False)):
            if tuple(tensor.shape) != prepared.shape:
                raise ValueError(
                    f"argument {number}: shape {tuple(tensor.shape)} must be {prepared.shape}, for "
                    "which the launch was prepared"
                )
        _, handle = self._handles.setdefault(id(launch.kernel), (launch.kernel, None))
        if handle is None:
            handle = self._wrap(launch.kernel)
            self._handles[id(launch.kernel)] = launch.kernel, handle
        if launch.grid == 2:
            handle = handle[2]
        others = launch.arrays[len(tensors) :]
        placed = (self._put(each) if isinstance(each, np.ndarray) else each for each in others)
        return handle(*tensors, *placed)

    def place(self, plan: DecodePlan) -> DecodePlan:
        """A plan whose lists are on the device, once for all layers of a step."""
        return replace(plan, lists=DecodeLists(*map(self._put, plan.lists.arrays())))


def torch_caller(device: str = "neuron") -> DeviceCaller:
    """For TorchNeuron: `torch_neuronx.wrap_nki` handles, which issue in a third of the time of a
    direct call. ImportError without torch_neuronx; one without wrap_nki calls kernels directly.
    """
    torch, neuron = import_module("torch"), import_module("torch_neuronx")

    def put(array: Array) -> Any:
        return torch.from_numpy(array).to(device)

    return DeviceCaller(getattr(neuron, "wrap_nki", lambda kernel: kernel), put)


def jax_caller() -> DeviceCaller:
    """For jax-neuronx: a kernel called inside `jax.jit` becomes a custom call. ImportError without
    jax. Donate caches that are written (`donate_argnums`), and give lists as arguments: what the
    traced function closes over is compiled in.
    """
    numpy = import_module("jax.numpy")
    return DeviceCaller(lambda kernel: kernel, numpy.asarray)
