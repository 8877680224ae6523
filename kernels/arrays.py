"""Arrays of the three kinds that the public kernels take, as NumPy arrays and back.

torch tensors on the CPU share memory with NumPy; JAX arrays are immutable, so their caches are
copied and returned as new arrays. Neither library is imported unless its arrays come in.
"""

import sys
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class ArrayKind(Protocol):
    """One library's arrays."""

    def read(self, array: Any) -> Array:
        """C-contiguous NumPy values of an argument that is only read."""

    def view(self, array: Any) -> Array:
        """NumPy values of a cache that is only read, of any strides."""

    def open_cache(self, array: Any) -> Array:
        """NumPy array that a kernel may write."""

    def close_cache(self, array: Any, written: Array) -> Any:
        """What to return for a cache after `written`, from open_cache, has been written."""

    def give(self, result: Array) -> Any:
        """A new result as an array of this kind."""


class _NumpyArrays:
    def read(self, array: Array) -> Array:
        return np.ascontiguousarray(array)

    def view(self, array: Array) -> Array:
        return array

    def open_cache(self, array: Array) -> Array:
        return array

    def close_cache(self, array: Array, written: Array) -> Array:
        return array

    def give(self, result: Array) -> Array:
        return result


class _TorchArrays:
    def __init__(self, torch: Any) -> None:
        self.torch = torch
        # torch's own names of the dtypes that NumPy knows through ml_dtypes, with equal bits.
        self.bits = {
            torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
            torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
            torch.float8_e5m2: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
        }

    def check(self, name: str, tensor: Any) -> None:
        """ValueError, naming the argument, for a tensor that NumPy cannot share."""
        try:
            self.open_cache(tensor)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{name}: {error}") from error

    def read(self, array: Any) -> Array:
        return np.ascontiguousarray(self.open_cache(array))

    def view(self, array: Any) -> Array:
        return self.open_cache(array)

    def open_cache(self, array: Any) -> Array:
        if array.device.type != "cpu":
            raise ValueError(f"device={array.device}: torch tensors must be on the CPU")
        array = array.detach()
        if array.dtype in self.bits:
            carrier, dtype = self.bits[array.dtype]
            shared: Array = array.view(carrier).numpy()
            return shared.view(dtype)
        return np.asarray(array.numpy())

    def close_cache(self, array: Any, written: Array) -> Any:
        return array

    def give(self, result: Array) -> Any:
        for name, (carrier, dtype) in self.bits.items():
            if result.dtype == dtype:
                raw = result.view(np.int16 if carrier == self.torch.int16 else np.uint8)
                return self.torch.from_numpy(raw).view(name)
        return self.torch.from_numpy(result)


class _JaxArrays:
    def __init__(self, jax: Any) -> None:
        self.jax = jax

    def read(self, array: Any) -> Array:
        if isinstance(array, self.jax.core.Tracer):
            raise TypeError("while JAX traces, call the functions of segattn.kernels.jax_ops")
        return np.ascontiguousarray(np.asarray(array))

    def view(self, array: Any) -> Array:
        return self.read(array)

    def open_cache(self, array: Any) -> Array:
        return np.array(self.read(array))

    def close_cache(self, array: Any, written: Array) -> Any:
        return self.jax.numpy.asarray(written)

    def give(self, result: Array) -> Any:
        return self.jax.numpy.asarray(result)


def array_kind(**arguments: Any) -> ArrayKind:
    """The kind that all arguments share.

    ValueError naming the first argument that is no array, is of another kind than the first one or
    is a tensor whose device, layout or dtype NumPy does not have.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    kinds: list[tuple[type[Any], str]] = [(np.ndarray, "numpy")]
    if torch is not None:
        kinds.append((torch.Tensor, "torch"))
    if jax is not None:
        kinds.append((jax.Array, "jax"))
    found: dict[str, str] = {}
    for name, value in arguments.items():
        matching = [kind for cls, kind in kinds if isinstance(value, cls)]
        if not matching:
            raise ValueError(f"{name}: {type(value).__name__} must be a NumPy, torch or JAX array")
        found[name] = matching[0]
    first, kind = next(iter(found.items()))
    for name, other in found.items():
        if other != kind:
            raise ValueError(f"{name}: a {other} array, must be {kind} as {first}")
    if kind == "torch":
        tensors = _TorchArrays(torch)
        for name, value in arguments.items():
            tensors.check(name, value)
        return tensors
    return _JaxArrays(jax) if kind == "jax" else _NumpyArrays()


def read_optional(kind: ArrayKind, value: Any) -> Any:
    """An optional argument as a NumPy array of its own shape; None as it is."""
    if value is None:
        return None
    if hasattr(value, "device") and not isinstance(value, (np.ndarray, np.generic)):
        return kind.open_cache(value)
    try:
        return np.asarray(value)
    except ValueError:
        # Ragged: refused by name where its dtype is checked.
        return np.asarray(value, object)
