"""View methods of NkiTensor: other shapes and strides on the same bytes."""

from __future__ import annotations

from math import prod
from typing import Any, TypeVar

from .dtypes import ITEMSIZE, LOW_PRECISION, PRECISE, dtype_name
from .errors import NkiValidationError
from .strided import Strided

Tensor = TypeVar("Tensor", bound=Strided)


def _free_dim(t: Strided, method: str, dim: int) -> None:
    """Refuse dimension 0 where it is the partition or an indirect dimension."""
    if not 0 <= dim <= t.ndim:
        raise NkiValidationError(f"{method}: dimension {dim} of a tensor of shape {t.shape}")
    if dim == 0 and fixed_first(t):
        raise NkiValidationError(
            f"{method}: dimension 0 is the partition dimension of an on-chip (or indirect) "
            "tensor; allowed are the free dimensions 1.."
        )


def fixed_first(t: Strided) -> bool:
    """Whether dimension 0 must stay as it is."""
    return t.v.layout.on_chip or (t.dynamic is not None and t.dynamic.vector)


def is_contiguous(t: Strided) -> bool:
    """Row-major without gaps; dimension 0 of on-chip tensors and size-1 dimensions do not count."""
    step = 1
    first = 1 if t.v.layout.on_chip else 0
    for n, stride in zip(reversed(t.shape[first:]), reversed(t.strides[first:]), strict=True):
        if n != 1 and stride != step:
            return False
        step *= n
    return True


def permute(t: Tensor, dims: tuple[int, ...]) -> Tensor:
    """NkiTensor.permute."""
    if sorted(dims) != list(range(t.ndim)):
        raise NkiValidationError(f"permute: {dims} is no permutation of 0..{t.ndim - 1}")
    if dims[0] != 0 and fixed_first(t):
        raise NkiValidationError(
            f"permute: dims[0] is {dims[0]}; the partition dimension must stay first"
        )
    return t.derive(tuple(t.shape[d] for d in dims), tuple(t.strides[d] for d in dims))


def broadcast(t: Tensor, dim: int, size: int) -> Tensor:
    """NkiTensor.broadcast."""
    _free_dim(t, "broadcast", dim)
    if t.shape[dim] != 1:
        raise NkiValidationError(
            f"broadcast: dimension {dim} has size {t.shape[dim]}; allowed is 1"
        )
    shape = t.shape[:dim] + (size,) + t.shape[dim + 1 :]
    return t.derive(shape, t.strides[:dim] + (0,) + t.strides[dim + 1 :])


def expand_dim(t: Tensor, dim: int) -> Tensor:
    """NkiTensor.expand_dim."""
    _free_dim(t, "expand_dim", dim)
    step = t.shape[dim] * t.strides[dim] if dim < t.ndim else 1
    return t.derive(
        t.shape[:dim] + (1,) + t.shape[dim:], t.strides[:dim] + (step,) + t.strides[dim:]
    )


def squeeze_dim(t: Tensor, dim: int) -> Tensor:
    """NkiTensor.squeeze_dim."""
    _free_dim(t, "squeeze_dim", dim)
    if t.shape[dim] != 1:
        raise NkiValidationError(
            f"squeeze_dim: dimension {dim} has size {t.shape[dim]}; allowed is 1"
        )
    return t.derive(t.shape[:dim] + t.shape[dim + 1 :], t.strides[:dim] + t.strides[dim + 1 :])


def reshape_dim(t: Tensor, dim: int, shape: tuple[int, ...]) -> Tensor:
    """NkiTensor.reshape_dim."""
    shape = _infer(shape, t.shape[dim], "reshape_dim")
    if shape == (t.shape[dim],):
        return t
    _free_dim(t, "reshape_dim", dim)
    strides = []
    step = t.strides[dim]
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return t.derive(
        t.shape[:dim] + shape + t.shape[dim + 1 :],
        t.strides[:dim] + tuple(reversed(strides)) + t.strides[dim + 1 :],
    )


def flatten_dims(t: Tensor, start_dim: int, end_dim: int) -> Tensor:
    """NkiTensor.flatten_dims."""
    if not 0 <= start_dim <= end_dim < t.ndim:
        raise NkiValidationError(
            f"flatten_dims({start_dim}, {end_dim}): a tensor with {t.ndim} dimensions"
        )
    if start_dim == end_dim:
        return t
    _free_dim(t, "flatten_dims", start_dim)
    merged = _merge(
        list(t.shape[start_dim : end_dim + 1]), list(t.strides[start_dim : end_dim + 1])
    )
    if len(merged) > 1:
        raise NkiValidationError(
            f"flatten_dims({start_dim}, {end_dim}): shape {t.shape} with strides {t.strides} "
            "is not contiguous over these dimensions; copy it first"
        )
    n, stride = merged[0] if merged else (1, t.strides[end_dim])
    return t.derive(
        t.shape[:start_dim] + (n,) + t.shape[end_dim + 1 :],
        t.strides[:start_dim] + (stride,) + t.strides[end_dim + 1 :],
    )


def reshape(t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """NkiTensor.reshape: the no-copy rule of NumPy on the strided view.

    On chip the partition dimension stays, except that a tensor on one partition may only keep
    that one partition.
    """
    shape = _infer(tuple(int(n) for n in shape), t.size, "reshape")
    if shape == t.shape:
        return t
    if fixed_first(t) and shape[0] != t.shape[0]:
        raise NkiValidationError(
            f"reshape {t.shape} -> {shape}: the partition dimension {t.shape[0]} must stay first"
        )
    strides = reshaped_strides(t.shape, t.strides, shape)
    if strides is None:
        raise NkiValidationError(
            f"reshape {t.shape} -> {shape}: strides {t.strides} do not allow it without a copy"
        )
    return t.derive(shape, strides)


def _infer(shape: tuple[int, ...], size: int, method: str) -> tuple[int, ...]:
    """Replace one -1 and check the product."""
    if -1 in shape:
        known = -prod(shape)
        if known > 0:
            shape = tuple(size // known if n == -1 else n for n in shape)
    if prod(shape) != size or any(n < 1 for n in shape):
        raise NkiValidationError(f"{method} to {shape}: product {prod(shape)}, needed {size}")
    return shape


def _merge(shape: list[int], strides: list[int]) -> list[tuple[int, int]]:
    """(size, stride) with neighbours that form one run merged and size-1 dimensions dropped."""
    merged: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if merged and merged[-1][1] == n * stride:
            merged[-1] = (merged[-1][0] * n, stride)
        else:
            merged.append((n, stride))
    return merged


def reshaped_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides of the reshaped view, or None when it needs a copy."""
    runs = _merge(list(shape), list(strides))
    out = [1] * len(new)
    run = len(runs) - 1
    left, step = runs[run] if runs else (1, 1)
    for dim in range(len(new) - 1, -1, -1):
        n = new[dim]
        if n == 1:
            out[dim] = step
            continue
        if left == 1:
            run -= 1
            left, step = runs[run]
        if left % n:
            return None
        out[dim] = step
        step *= n
        left //= n
    return tuple(out)


def rearrange(
    t: Tensor,
    src_pattern: tuple[Any, ...],
    dst_pattern: tuple[Any, ...],
    fixed_sizes: dict[str, int] | None,
) -> Tensor:
    """NkiTensor.rearrange: split by the source groups, permute, merge by the target groups."""
    sizes = dict(fixed_sizes or {})
    if len(src_pattern) != t.ndim:
        raise NkiValidationError(
            f"rearrange: pattern {src_pattern} for a tensor of shape {t.shape}"
        )
    names: list[str] = []
    split = t
    for group, n in zip(src_pattern, t.shape, strict=True):
        members = (group,) if isinstance(group, str) else tuple(group)
        wanted = tuple(sizes.get(m, -1) for m in members)
        if wanted.count(-1) > 1:
            raise NkiValidationError(
                f"rearrange: sizes of {members} are ambiguous; give all but one in fixed_sizes"
            )
        if len(members) > 1 or wanted != (-1,):
            split = reshape_dim(split, len(names), _infer(wanted, n, "rearrange"))
        names.extend(members)
    order: list[str] = []
    groups = [(g,) if isinstance(g, str) else tuple(g) for g in dst_pattern]
    for members in groups:
        order.extend(members)
    if sorted(order) != sorted(names):
        raise NkiValidationError(f"rearrange: {dst_pattern} does not name {tuple(names)}")
    out = permute(split, tuple(names.index(m) for m in order))
    for dim, members in enumerate(groups):
        out = flatten_dims(out, dim, dim + len(members) - 1)
    return out


def reinterpret(t: Tensor, dtype: str) -> Tensor:
    """NkiTensor.view: the bits as another dtype, the last dimension contiguous and rescaled."""
    dtype = dtype_name(dtype)
    if not PRECISE and dtype != t.dtype and LOW_PRECISION & {dtype, t.dtype}:
        raise NkiValidationError(
            f"view({dtype}) of {t.dtype}: NKI_PRECISE_FP=0 keeps no bits of low-precision floats"
        )
    old, new = t.v.layout.itemsize, ITEMSIZE[dtype]
    if t.dynamic is not None and not t.dynamic.vector:
        raise NkiValidationError("view(dtype) after a dynamic select; reinterpret before it")
    if t.dynamic is not None and old != new:
        raise NkiValidationError("view(dtype) of an indirect tensor with another item size")
    shape, strides, offset = t.shape, t.strides, t.offset
    if old != new:
        if strides[-1] != 1 and shape[-1] != 1:
            raise NkiValidationError(
                f"view({dtype}): the last dimension has stride {strides[-1]}; it must be contiguous"
            )
        steps = strides[:-1] + (offset,) if new > old else ()
        ratio = new // old
        if new > old and (shape[-1] % ratio or any(s % ratio for s in steps)):
            raise NkiValidationError(
                f"view({dtype}) of {t.dtype} with shape {shape}, strides {strides}, offset "
                f"{offset}: all but the last stride must be multiples of {ratio}"
            )
        shape = shape[:-1] + (shape[-1] * old // new,)
        strides = tuple(s * old // new for s in strides[:-1]) + (1,)
        offset = offset * old // new
    return t.on(t.storage.view(dtype, shape, strides, offset), t.dynamic)
