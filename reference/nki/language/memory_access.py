"""`nl.load`, `nl.store` and other functions that move data."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import dtype_name
from ..errors import NkiValidationError
from ..isa.copies import tensor_copy
from ..isa.dma import dma_copy
from ..isa.execute import finish, fp32, operand_value, put, view_of
from ..isa.gathers import nc_n_gather
from ..isa.matmul import nc_matmul
from ..isa.random import dropout as drop
from ..isa.transpose import nc_transpose
from ..regions import ON_CHIP, PSUM, SBUF
from ..tensor import NkiTensor
from .creation import allocate


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the values of an HBM tensor; a 1-D tensor becomes [n, 1]."""
    made = allocate(src.shape, dtype or src.dtype)
    dma_copy(made, src)
    return made


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Write an SBUF tile to an HBM tensor."""
    dma_copy(dst, value)


def load_transpose2d(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A new SBUF tile with the transpose of a 2-D HBM tensor."""
    if src.ndim != 2:
        raise NkiValidationError(f"nl.load_transpose2d: src has shape {src.shape}; allowed: 2-D")
    made = allocate((src.shape[1], src.shape[0]), dtype or src.dtype)
    dma_copy(made, src.permute((1, 0)))
    return made


def transpose(x: NkiTensor, dtype: Any = None) -> NkiTensor:
    """The transpose of a 2-D tile: through PSUM for tiles beyond 32 x 32."""
    small = x.shape[0] <= 32 and x.v.layout.free <= 32
    made = allocate((x.v.layout.free, x.shape[0]), dtype or x.dtype, x.buffer if small else PSUM)
    nc_transpose(made, x)
    return made


def matmul(x: NkiTensor, y: NkiTensor, transpose_x: bool = False) -> NkiTensor:
    """X @ y (x.T @ y with transpose_x) as a new PSUM tile."""
    stationary = x
    if not transpose_x:
        flipped = transpose(x)
        stationary = allocate(flipped.shape, x.dtype)
        tensor_copy(stationary, flipped)
    made = allocate((stationary.v.layout.free, y.v.layout.free), "float32", PSUM)
    nc_matmul(made, stationary, y)
    return made


def expand_dims(x: NkiTensor, axis: int) -> NkiTensor:
    """X with a dimension of size 1 inserted at `axis`."""
    return x.expand_dim(axis + x.ndim + 1 if axis < 0 else axis)


def broadcast_to(x: NkiTensor, shape: tuple[int, ...], dtype: Any = None) -> NkiTensor:
    """A view of x with size-1 dimensions repeated; same rank."""
    shape = tuple(shape)
    if len(shape) != x.ndim:
        raise NkiValidationError(
            f"nl.broadcast_to: shape {shape} for a tensor of shape {x.shape}; the rank must agree"
        )
    for n, m in zip(x.shape, shape, strict=True):
        if n not in (1, m):
            raise NkiValidationError(f"nl.broadcast_to: {x.shape} does not broadcast to {shape}")
    strides = tuple(
        0 if n == 1 and m != 1 else s for n, m, s in zip(x.shape, shape, x.strides, strict=True)
    )
    return x.derive(shape, strides, x.offset)


def is_hbm(buffer: Any) -> bool:
    """Whether the buffer is in HBM."""
    return not is_on_chip(buffer)


def is_on_chip(buffer: Any) -> bool:
    """Whether the buffer is SBUF or PSUM."""
    return buffer in ON_CHIP


def is_psum(buffer: Any) -> bool:
    """Whether the buffer is PSUM."""
    return buffer is PSUM


def is_sbuf(buffer: Any) -> bool:
    """Whether the buffer is SBUF."""
    return buffer is SBUF


def where(condition: NkiTensor, x: Any, y: Any, dtype: Any = None) -> NkiTensor:
    """X where the condition tile is nonzero, else y; tiles or scalars."""
    like = next((t for t in (x, y) if isinstance(t, NkiTensor)), condition)
    made = allocate(condition.shape, dtype or like.dtype)
    reads = tuple(t for t in (condition, x, y) if isinstance(t, NkiTensor))
    chosen = np.where(
        fp32(condition, "nl.where", "condition") != 0,
        operand_value(x, condition.ndim, "nl.where", "x"),
        operand_value(y, condition.ndim, "nl.where", "y"),
    )
    put(made, chosen, "nl.where")
    finish("vector", "where", (made,), reads)
    return made


def dropout(x: NkiTensor, rate: Any, dtype: Any = None) -> NkiTensor:
    """X with elements zeroed with probability `rate`, a scalar or a [P, 1] tile."""
    dropped = allocate(x.shape, x.dtype)
    drop(dropped, x, rate)
    if dtype is None or dtype_name(dtype) == x.dtype:
        return dropped
    made = allocate(x.shape, dtype)
    tensor_copy(made, dropped)
    return made


def gather_flattened(
    data: NkiTensor, indices: NkiTensor, axis: int = 0, dtype: Any = None
) -> NkiTensor:
    """data[p, indices[p, i]] over the flattened free dimensions."""
    if axis != 0:
        raise NkiValidationError(f"nl.gather_flattened: axis {axis}; allowed: 0")
    gathered = allocate(indices.shape, data.dtype)
    nc_n_gather(gathered, data, indices)
    if dtype is None or dtype_name(dtype) == data.dtype:
        return gathered
    made = allocate(indices.shape, dtype)
    tensor_copy(made, gathered)
    return made


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Print the prefix and the values of a tensor in SBUF or HBM, `--` where nothing wrote."""
    if not isinstance(print_prefix, str):
        raise NkiValidationError("nl.device_print: print_prefix must be a constant string")
    if tensor.buffer is PSUM:
        raise NkiValidationError("nl.device_print: tensor is in PSUM; allowed: SBUF, HBM")
    view = view_of(tensor, "nl.device_print", "tensor")
    missing = tensor.storage.unwritten_in(view)
    print(print_prefix, view.array if missing is None else np.ma.array(view.array, mask=missing))
