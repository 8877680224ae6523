"""`tensor[...]`, slice and select."""

from __future__ import annotations

from typing import Any, Final, SupportsIndex, TypeVar

from .dtypes import INTEGERS
from .errors import NkiValidationError, at_kernel_line
from .nkiobject import NKIObject
from .regions import ON_CHIP
from .registers import RunTimeValue
from .strict import violation
from .strided import Dynamic, Strided

Tensor = TypeVar("Tensor", bound=Strided)


class DynamicSlice(NKIObject):
    """`nl.ds(start, size)`: `size` elements from `start`, an int or a run-time value."""

    __slots__ = ("size", "start")

    def __init__(self, start: RunTimeValue | int, size: int) -> None:
        self.start = start if isinstance(start, RunTimeValue) else start.__index__()
        self.size = size.__index__()

    def __repr__(self) -> str:
        return f"nl.ds({self.start}, {self.size})"


def getitem(t: Tensor, key: Any) -> Tensor:
    """NumPy-style view.

    On chip an int on dimension 0 keeps it at size 1 and the result has at least two dimensions;
    in HBM it has at least one (the last dropped dimension stays, with size 1). Slices clamp.
    """
    layout = t.v.layout
    keys = key if type(key) is tuple else (key,)
    num_keys = len(keys)
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys = keys[:at] + (_ALL,) * (layout.ndim - num_keys + 1) + keys[at + 1 :]
        num_keys = len(keys)
    if num_keys > layout.ndim:
        raise NkiValidationError(
            f"index {key!r} has {num_keys} entries for a tensor of shape {layout.shape}"
        )
    if t.dynamic is not None:
        _check_dynamic(t, keys)
    shape: list[int] = []
    strides: list[int] = []
    offset = t.v.offset
    dropped = -1
    dynamic = t.dynamic
    for dim, (k, n, stride) in enumerate(zip(keys, layout.shape, layout.strides, strict=False)):
        if type(k) is slice:
            if k.start is None and k.stop is None and k.step is None:
                shape.append(n)
                strides.append(stride)
                continue
            start, stop, step = k.indices(n)
            first, last = k.start, k.stop
            if (last is not None and (last > n or last < -n)) or (
                first is not None and (first > n or first < -n)
            ):
                _clipped(t, k, dim, n)
            if step < 1:
                raise NkiValidationError(f"slice {k} of dimension {dim}: step {step}; allowed >= 1")
            if stop <= start:
                return _nothing(t, f"{first}:{last}", dim, n)
            shape.append((stop - start + step - 1) // step)
            strides.append(stride * step)
            offset += start * stride
        elif type(k) is DynamicSlice and isinstance(k.start, RunTimeValue):
            if not 1 <= k.size <= n:
                raise NkiValidationError(
                    f"nl.ds(register, {k.size}) on dimension {dim} of size {n}: sizes 1..{n}"
                )
            dynamic = _run_time(t, dim, k.start, n - k.size, dynamic)
            shape.append(k.size)
            strides.append(stride)
        elif isinstance(k, RunTimeValue):
            dynamic = _run_time(t, dim, k, n - 1, dynamic)
            dropped = dim
        elif type(k) is DynamicSlice and isinstance(k.start, int):
            if k.size == 0 and 0 <= k.start <= n:
                return _nothing(t, f"nl.ds({k.start}, 0)", dim, n)
            if k.start < 0 or k.size < 1 or k.start + k.size > n:
                raise NkiValidationError(
                    f"nl.ds({k.start}, {k.size}) leaves dimension {dim} of size {n}"
                )
            shape.append(k.size)
            strides.append(stride)
            offset += k.start * stride
        else:
            i = _integer(k, dim, n)
            offset += i * stride
            if dim == 0 and layout.on_chip:
                shape.append(1)
                strides.append(stride)
            else:
                dropped = dim
    shape.extend(layout.shape[num_keys:])
    strides.extend(layout.strides[num_keys:])
    if dropped >= 0 and len(shape) < (2 if layout.on_chip else 1):
        shape.append(1)
        strides.append(layout.strides[dropped])
    made = t.derive(tuple(shape), tuple(strides), offset)
    made.dynamic = dynamic
    return made


def _clipped(t: Strided, key: slice, dim: int, n: int) -> None:
    """Rule "slice_bounds": NumPy would clip the slice."""
    violation(
        "slice_bounds",
        f"slice {key.start}:{key.stop} of dimension {dim} of {t.name!r}, whose size is {n}, would "
        f"be clipped; end it at min(end, {n})",
    )


def _run_time(t: Strided, dim: int, index: Any, last: int, already: Dynamic | None) -> Dynamic:
    """A register (or one-element tensor) as index of a dimension, 0 to `last`."""
    if isinstance(index, Strided) and (index.size != 1 or index.dtype not in INTEGERS):
        raise NkiValidationError(
            f"dimension {dim}: a run-time index of shape {index.shape} and dtype {index.dtype}; "
            "allowed: one integer, a register or a scalar"
        )
    if isinstance(index, RunTimeValue):
        index.check_address(f"index on dimension {dim}", on_chip=t.buffer in ON_CHIP)
    if already is not None:
        raise NkiValidationError(
            f"dimension {dim}: a run-time index on a view that has a run-time address already"
        )
    if t.buffer in ON_CHIP and dim == 0:
        raise NkiValidationError(
            f"dimension 0 of {t.name!r}: the partition dimension of on-chip tensors cannot have a "
            "run-time index; use a free dimension, or an HBM tensor"
        )
    return Dynamic(index, t.strides[dim], vector=False, dim=-1, last=last)


def _nothing(t: Tensor, what: str, dim: int, n: int) -> Tensor:
    """A view without elements: a core without work may make one, using it is the error."""
    return t.unusable(
        NkiValidationError(
            f"{what} selects nothing of dimension {dim} of {t.name!r}, whose size is {n}: a view "
            f"has at least one element, so leave the instruction out where start == end"
            f"{at_kernel_line()}"
        ),
    )


_ALL: Final = slice(None)


def _check_dynamic(t: Strided, keys: tuple[Any, ...]) -> None:
    """The dimension of a vector_offset cannot be indexed further."""
    dim = t.dynamic.dim if t.dynamic is not None else -1
    if 0 <= dim < len(keys) and keys[dim] != _ALL:
        raise NkiValidationError(
            f"dimension {dim} of an indirect view takes part in the indirection "
            "and cannot be sliced or selected"
        )


def _integer(k: Any, dim: int, n: int) -> int:
    if type(k) is not int and (isinstance(k, bool) or not isinstance(k, SupportsIndex)):
        instead = "a tensor index is t.select(dim, tensor) or .ap(scalar_offset=...)"
        if isinstance(k, range):
            step = "" if k.step == 1 else f":{k.step}"
            instead = f"write {k.start}:{k.stop}{step} instead of a range"
        raise NkiValidationError(
            f"index {k!r} on dimension {dim}: allowed are integers, slices, Ellipsis, nl.ds and "
            f"registers; {instead}"
        )
    i = k.__index__()
    if i < -n or i >= n:
        raise NkiValidationError(f"index {i} on dimension {dim} of size {n}")
    return i + n if i < 0 else i


def slice_dim(t: Tensor, dim: int, start: int, end: int, step: int) -> Tensor:
    """NkiTensor.slice; NkiValidationError outside 0 <= start < end <= size, step >= 1."""
    n = t.shape[_dimension(t, dim)]
    if not (0 <= start < end <= n and step >= 1):
        raise NkiValidationError(
            f"slice(dim={dim}, start={start}, end={end}, step={step}): allowed is "
            f"0 <= start < end <= {n} and step >= 1"
        )
    keys = [slice(None)] * t.ndim
    keys[dim] = slice(start, end, step)
    return getitem(t, tuple(keys))


def select(t: Tensor, dim: int, index: Any) -> Tensor:
    """NkiTensor.select with a static, register or tensor index."""
    dim = _dimension(t, dim)
    if not isinstance(index, (Strided, RunTimeValue)):
        if not 0 <= index < t.shape[dim]:
            raise NkiValidationError(
                f"select(dim={dim}, index={index}): allowed is 0..{t.shape[dim] - 1}"
            )
        return getitem(t, (slice(None),) * dim + (index,))
    dynamic = _run_time(t, dim, index, t.shape[dim] - 1, t.dynamic)
    shape = t.shape[:dim] + t.shape[dim + 1 :]
    strides = t.strides[:dim] + t.strides[dim + 1 :]
    if len(shape) < (2 if t.buffer in ON_CHIP else 1):
        shape, strides = shape + (1,), strides + (t.strides[dim],)
    rest = t.derive(shape, strides, t.offset)
    return t.on(rest.v, dynamic)


def _dimension(t: Strided, dim: int) -> int:
    if not 0 <= dim < t.ndim:
        raise NkiValidationError(f"dimension {dim} of a tensor with {t.ndim} dimensions")
    return dim
