"""Caller arrays (NumPy, torch, JAX) as HBM tensors of a launch, and results back.

A contiguous writable array is used in place: what the kernel writes, the caller sees. Other
arrays are copied in, and copied back when the kernel wrote them and the array is writable.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .dtypes import NUMPY, Array, cast, dtype_name, sentinel
from .errors import NkiValidationError, UninitializedReadError
from .layout import row_major
from .regions import SHARED_HBM, MemoryRegion
from .rules.views import MAX_DIMS, check_partial_output, check_rank
from .storage import Storage, Watch
from .strict import violation
from .tensor import NkiTensor, handle
from .view import View


class _CopyOnWrite(Watch):
    """A read-only array: the first write goes to a copy."""

    __slots__ = ()

    def before_write(
        self, storage: Storage, view: View, instruction: str, rows: Array | None = None
    ) -> None:
        storage.move_to(storage.buffer.copy())
        storage.watch = None


class Arguments:
    """The array arguments of one launch."""

    def __init__(self, region: MemoryRegion = SHARED_HBM) -> None:
        self.region = region
        self.tensors: list[tuple[Storage, Any, Array]] = []
        self.framework: Callable[[Array], Any] | None = None

    def bind(self, value: Any, name: str = "") -> Any:
        """Replace arrays, also inside tuples, lists and dicts, by HBM tensors."""
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(self.bind(v, name) for v in value)
        if isinstance(value, list):
            return [self.bind(v, name) for v in value]
        if isinstance(value, dict):
            return {k: self.bind(v, str(k)) for k, v in value.items()}
        array = self._as_numpy(value)
        return value if array is None else self._tensor(value, array, name)

    def _as_numpy(self, value: Any) -> Array | None:
        if isinstance(value, np.ndarray):
            return value
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
            self.framework = _to_torch
            return _from_torch(value)
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(value, getattr(jax, "Array", ())):
            self.framework = jax.numpy.asarray
            return np.asarray(value)
        return None

    def _tensor(self, origin: Any, array: Array, name: str) -> NkiTensor:
        try:
            dtype = dtype_name(array.dtype)
        except NkiValidationError as error:
            raise NkiValidationError(f"argument {name!r}: {error}") from None
        shape = array.shape or (1,)
        if 0 in shape:
            raise NkiValidationError(f"argument {name!r} has shape {array.shape}: no elements")
        if len(shape) > MAX_DIMS:
            check_rank(f"argument {name!r}", shape, on_chip=False)
        flat = np.ascontiguousarray(array, dtype=NUMPY[dtype]).reshape(-1)
        storage = Storage(self.region, flat.view(np.uint8), flat.nbytes, name=name, written=True)
        if not array.flags.writeable and np.may_share_memory(flat, array):
            storage.watch = _CopyOnWrite()
        self.tensors.append((storage, origin, array))
        return handle(storage, storage.view(dtype, shape, row_major(shape), 0))

    def copy_back(self) -> None:
        """Give written copies of non-contiguous writable arrays back to the caller."""
        for storage, _, array in self.tensors:
            if storage.version and array.flags.writeable:
                flat = storage.buffer.view(NUMPY[dtype_name(array.dtype)])
                if not np.may_share_memory(flat, array):
                    array[...] = flat.reshape(array.shape)

    def result(self, value: Any) -> Any:
        """Replace HBM tensors by arrays of the caller's framework."""
        if isinstance(value, tuple):
            return tuple(self.result(v) for v in value)
        if isinstance(value, list):
            return [self.result(v) for v in value]
        if isinstance(value, dict):
            return {k: self.result(v) for k, v in value.items()}
        if not isinstance(value, NkiTensor):
            return value
        if value.buffer is not SHARED_HBM:
            raise NkiValidationError(
                f"kernel output {value.name!r} is in {value.buffer.value}; outputs must be "
                "allocated with buffer=nl.shared_hbm"
            )
        for storage, origin, array in self.tensors:
            if storage is value.storage and value.shape == array.shape and array.flags.writeable:
                return origin
        out = value.v.array
        storage = value.storage
        missing = storage.unwritten_in(value.v)
        if missing is not None:
            if missing.all() and missing.size:
                violation(
                    "uninitialized_read",
                    f"nothing wrote the kernel output {value.name!r}: store into it, or do not "
                    "return it",
                    UninitializedReadError,
                )
            else:
                check_partial_output(value.name, missing)
            out[missing] = cast(np.asarray(sentinel(value.dtype)), value.dtype)
        return out if self.framework is None else self.framework(out)


def _from_torch(tensor: Any) -> Array:
    """The memory of a CPU tensor as a NumPy array of the same dtype."""
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        raise NkiValidationError(f"a tensor on device {tensor.device}; allowed: cpu")
    name = str(tensor.dtype).rsplit(".", 1)[-1]
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        bits = torch.int16 if name == "bfloat16" else torch.uint8
        array: Array = tensor.view(bits).numpy().view(np.dtype(name))
        return array
    plain: Array = tensor.numpy()
    return plain


def _to_torch(array: Array) -> Any:
    torch = sys.modules["torch"]
    array = np.ascontiguousarray(array)
    name = array.dtype.name
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        bits = np.int16 if name == "bfloat16" else np.uint8
        return torch.from_numpy(array.view(bits)).view(getattr(torch, name))
    return torch.from_numpy(array)
