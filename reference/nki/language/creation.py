"""Tensor creation in `nki.language`."""

from __future__ import annotations

import inspect
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..core import current
from ..dtypes import DEVICE_ITEMSIZE, FLOATS, ITEMSIZE, PRECISE, Array, cast, dtype_name
from ..errors import NkiValidationError, assigned_name, kernel_line
from ..indexing import DynamicSlice
from ..isa.copies import memset
from ..isa.execute import put
from ..layout import row_major
from ..nkiobject import _NkiMeta
from ..regions import (
    HBM,
    NUM_PARTITIONS,
    PSUM,
    PSUM_PARTITION_BYTES,
    SBUF,
    SBUF_PARTITION_BYTES,
    SHARED_HBM,
    MemoryRegion,
)
from ..registers import RunTimeValue
from ..rules.views import check_rank
from ..storage import Storage
from ..tensor import NkiTensor, handle


class _NdarrayMeta(_NkiMeta):
    """`nl.ndarray(...)` allocates; as a class it is NkiTensor, so it also serves as annotation."""

    def __call__(self, *args: Any, **kwargs: Any) -> NkiTensor:
        return allocate(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, NkiTensor)


class ndarray(NkiTensor, metaclass=_NdarrayMeta):  # noqa: N801  # NKI's name
    """A new uninitialised tensor; `address`: (first partition, byte) on chip, (byte,) in HBM."""

    __slots__ = ()

    def __init__(
        self,
        shape: Any,
        dtype: Any,
        buffer: MemoryRegion = SBUF,
        name: str = "",
        address: tuple[int, ...] | None = None,
    ) -> None:
        """Never runs: the metaclass allocates. It tells type checkers the parameters."""


def ds(start: RunTimeValue | int, size: int) -> DynamicSlice:
    """Index of `size` elements from `start`, an int or a run-time value."""
    return DynamicSlice(start, size)


def allocate(
    shape: Any,
    dtype: Any,
    buffer: MemoryRegion = SBUF,
    name: str = "",
    address: tuple[int, ...] | None = None,
) -> NkiTensor:
    """What nl.ndarray does."""
    if type(shape) is tuple:
        template = _templates.get((shape, dtype, buffer))
        if template is not None and address is None:
            return template.tile(name)
    dtype = dtype_name(dtype)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    try:
        sizes = tuple([n.__index__() for n in shape])
    except AttributeError as error:
        raise NkiValidationError(f"nl.ndarray: shape {shape}; allowed: integers") from error
    if not sizes or min(sizes) < 1:
        raise NkiValidationError(f"nl.ndarray: shape {shape}; allowed: sizes of at least 1")
    if not isinstance(buffer, MemoryRegion):
        raise NkiValidationError(
            f"nl.ndarray: buffer {buffer!r}; allowed: nl.sbuf, nl.psum, nl.private_hbm, "
            "nl.shared_hbm (strings were removed in 0.3.0)"
        )
    usual = check_rank("nl.ndarray", sizes, buffer not in HBM)
    if buffer in HBM:
        nbytes = prod(sizes) * ITEMSIZE[dtype]
        if address is not None:
            _claim(address, nbytes, name)
        storage = current().new_hbm(buffer, nbytes, name, (sizes, dtype))
        return handle(storage, storage.view(dtype, sizes, row_major(sizes), 0))
    template = _Template(sizes, dtype, buffer)
    if address is not None:
        storage = template.addressed(name, address)
        return handle(storage, storage.view(dtype, sizes, template.strides, 0))
    if usual:
        _templates[sizes, dtype, buffer] = template
    return template.tile(name)


def _claim(address: Any, nbytes: int, name: str) -> None:
    """Check an HBM address (first byte,): no other tensor of the core may lie there."""
    if not (isinstance(address, tuple) and len(address) == 1 and address[0].__index__() >= 0):
        raise NkiValidationError(
            f"nl.ndarray: address {address!r} of an HBM tensor; allowed: (first byte,)"
        )
    core, start = current(), address[0].__index__()
    for first, end, other in core.hbm:
        if start < end and first < start + nbytes:
            raise NkiValidationError(
                f"nl.ndarray: HBM tensor {name!r} at bytes {start}..{start + nbytes - 1} overlaps "
                f"{other!r} at {first}..{end - 1}"
            )
    core.hbm.append((start, start + nbytes, name))


ndarray.__signature__ = inspect.signature(allocate)  # type: ignore[attr-defined]  # read by inspect


class _Template:
    """What all on-chip tiles of one shape, dtype and buffer have in common."""

    __slots__ = ("buffer", "dtype", "partitions", "row_bytes", "sizes", "stored", "strides")

    def __init__(self, sizes: tuple[int, ...], dtype: str, buffer: MemoryRegion) -> None:
        free = prod(sizes[1:])
        self.sizes = sizes
        self.dtype = dtype
        self.buffer = buffer
        self.strides = row_major(sizes)
        self.partitions = sizes[0]
        self.row_bytes = free * DEVICE_ITEMSIZE[dtype]
        self.stored = free * ITEMSIZE[dtype]
        where = f"nl.ndarray: {buffer.value} tile of shape {sizes}"
        if dtype == "int64" and prod(sizes) != 1:
            raise NkiValidationError(f"{where} and dtype int64; allowed on chip: one element")
        if sizes[0] > NUM_PARTITIONS:
            raise NkiValidationError(f"{where}: {sizes[0]} partitions; limit {NUM_PARTITIONS}")
        limit = PSUM_PARTITION_BYTES if buffer is PSUM else SBUF_PARTITION_BYTES
        if self.row_bytes > limit:
            raise NkiValidationError(
                f"{where}: {self.row_bytes} bytes per partition; limit {limit}"
            )

    def tile(self, name: str) -> NkiTensor:
        """A tile that the allocator may place anywhere."""
        storage = current().new_tile(
            self.buffer, self.partitions, self.row_bytes, name, self.stored
        )
        return handle(storage, storage.view(self.dtype, self.sizes, self.strides, 0))

    def addressed(self, name: str, address: tuple[int, ...]) -> Storage:
        """A tile at (first partition, byte offset)."""
        core = current()
        if len(address) != 2:
            raise NkiValidationError(
                f"nl.ndarray: address {address}; allowed on chip: (first partition, byte offset)"
            )
        start, byte = address
        if byte.__index__() % DEVICE_ITEMSIZE[self.dtype]:
            raise NkiValidationError(
                f"nl.ndarray: address {address} of a {self.dtype} tile; the byte offset must be a "
                f"multiple of the element's {DEVICE_ITEMSIZE[self.dtype]} bytes"
            )
        placed = core.arena(self.buffer).tile(
            self.partitions,
            self.row_bytes,
            (start.__index__(), byte.__index__()),
            name or assigned_name(*kernel_line()),
        )
        if PRECISE:
            return placed
        return core.new_tile(self.buffer, self.partitions, self.row_bytes, name, self.stored)


_templates: dict[tuple[tuple[int, ...], str, MemoryRegion], _Template] = {}


def full(
    shape: Any, fill_value: Any, dtype: Any, buffer: MemoryRegion = SBUF, name: str = ""
) -> NkiTensor:
    """A new tensor filled with one value."""
    made = allocate(shape, dtype, buffer, name)
    if made.dtype not in FLOATS:
        fill_value = int(fill_value)
    if made.v.layout.on_chip:
        memset(made, fill_value)
    else:
        put(
            made,
            np.full(made.shape, fill_value, np.float32 if made.dtype in FLOATS else np.int64),
            "nl.full",
        )
    return made


def zeros(shape: Any, dtype: Any, buffer: MemoryRegion = SBUF, name: str = "") -> NkiTensor:
    """A new tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def ones(shape: Any, dtype: Any, buffer: MemoryRegion = SBUF, name: str = "") -> NkiTensor:
    """A new tensor of ones."""
    return full(shape, 1, dtype, buffer, name)


def zeros_like(
    x: NkiTensor, dtype: Any = None, buffer: MemoryRegion | None = None, name: str = ""
) -> NkiTensor:
    """Zeros with the shape (and dtype, buffer unless given) of x."""
    return zeros(x.shape, dtype or x.dtype, buffer or x.buffer, name)


def rand(shape: Any, dtype: Any, buffer: MemoryRegion = SBUF, name: str = "") -> NkiTensor:
    """Uniform values in [0, 1) from the seed of `random_seed`."""
    made = allocate(shape, dtype, buffer, name)
    put(made, current().random.random(made.shape, np.float32), "nl.rand")
    return made


def random_seed(seed: Any) -> None:
    """Seed the generator of rand and dropout with an int or a one-element tensor."""
    value = seed.numpy().reshape(-1)[0] if isinstance(seed, NkiTensor) else seed
    current().random = np.random.default_rng(int(value) & 0xFFFFFFFF)


def shared_constant(constant: Any) -> NkiTensor:
    """A shared_hbm tensor with the contents of an array or of a .npy file."""
    array: Array = np.load(constant) if isinstance(constant, (str, Path)) else np.asarray(constant)
    dtype = dtype_name(array.dtype)
    shape = array.shape or (1,)
    flat = np.ascontiguousarray(array).reshape(-1).copy()
    storage = Storage(SHARED_HBM, flat.view(np.uint8), flat.nbytes, name="constant", written=True)
    return handle(storage, storage.view(dtype, shape, row_major(shape), 0))


def shared_identity_matrix(n: int, dtype: Any = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """The n x n identity in SBUF, one per dtype and launch; or written into `dst`."""
    dtype = dtype_name(dtype) if dst is None else dst.dtype
    identity = cast(np.eye(n, dtype=np.float32), dtype)
    if dst is not None:
        put(dst, identity, "nl.shared_identity_matrix")
        return dst
    constants = current().constants
    key = ("identity", n, dtype)
    found = constants.get(key)
    if found is None:
        found = constants[key] = allocate((n, n), dtype, SBUF, f"identity_{n}_{dtype}")
        found.storage.born = 0  # older than any loop: it is there before the first trip
        put(found, identity, "nl.shared_identity_matrix")
    return found
