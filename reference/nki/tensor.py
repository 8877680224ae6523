"""NkiTensor: a strided view of a storage, as kernels handle it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, SupportsFloat

from . import access_pattern, indexing, views
from .changes import missing_attribute
from .dtypes import ITEMSIZE, Array, dtype_name
from .errors import NkiValidationError, RunTimeValueError, at_kernel_line
from .layout import row_major
from .records import Access
from .regions import SBUF, MemoryRegion
from .registers import RunTimeValue
from .storage import Storage
from .strided import Dynamic, Strided
from .view import View


class NkiTensor(Strided):
    """NKI tensor with shape-based view operations; views share the storage, nothing is copied.

    Dimension 0 of SBUF and PSUM tensors is the partition dimension.
    """

    __slots__ = ()

    assign: ClassVar[Callable[[NkiTensor, Any], None]]
    """`tensor[...] = value`, from the copy instructions, which build on this module."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: str,
        storage: Any,
        buffer: MemoryRegion | str = SBUF,
        name: str = "",
        address: tuple[int, ...] | None = None,
    ) -> None:
        if not isinstance(storage, Storage):
            raise NkiValidationError(
                f"NkiTensor needs a storage handle, got {type(storage).__name__}; "
                "allocate tensors with nl.ndarray"
            )
        if address is not None:
            raise NkiValidationError(
                f"NkiTensor: address {address} with a storage, which has its own; allocate a "
                "tensor at an address with nl.ndarray"
            )
        dtype = dtype_name(dtype)
        shape = tuple(int(n) for n in shape)
        strides = row_major(shape)
        if shape[0] * strides[0] * ITEMSIZE[dtype] > storage.nbytes:
            raise NkiValidationError(
                f"a {dtype} tensor of shape {shape} does not fit the {storage.nbytes} bytes "
                f"of storage {storage.name!r}"
            )
        if name:
            storage.name = name
        self.storage = storage
        self.v = storage.view(dtype, shape, strides, 0)
        self.dynamic = None

    @property
    def access(self) -> Access:
        """The memory this view touches, at its run-time offset, for the trace."""
        dynamic = self.dynamic
        view = self.v
        if dynamic is not None and not dynamic.vector:
            view = access_pattern.resolve(self, "trace") or view
        found = view.access
        if found is None:
            found = view.access = self.storage.access_of(view)
        if dynamic is not None and dynamic.vector:
            return found._replace(indirect=True)
        return found

    def __repr__(self) -> str:
        text = f"NkiTensor({self.name!r}, {self.shape}, {self.dtype}, {self.buffer.value})"
        if self.dynamic is not None:
            return text
        return f"{text}\n{self.v.array}"

    @property
    def data(self) -> NkiTensor:
        """The tensor itself, as grids have it: the pages of 0.7 write `tile.data` for both."""
        return self

    def numpy(self) -> Array:
        """A copy of the values, for debugging."""
        return self.v.array.copy()

    def is_contiguous(self) -> bool:
        """Whether the free dimensions (HBM: all) are row-major without gaps."""
        return views.is_contiguous(self)

    def get_pattern(self) -> list[list[int]]:
        """Access pattern [[step, count], ...] in the order of the shape."""
        return [[s, n] for s, n in zip(self.strides, self.shape, strict=True)]

    def is_indirect(self) -> bool:
        """Whether the address depends on a run-time value."""
        return self.dynamic is not None

    def __getitem__(self, key: Any) -> NkiTensor:
        return indexing.getitem(self, key)

    def __getattr__(self, name: str) -> NoReturn:
        raise missing_attribute(name, [n for n in dir(type(self)) if not n.startswith("_")])

    def __setitem__(self, key: Any, value: Any) -> None:
        NkiTensor.assign(indexing.getitem(self, key), value)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> NoReturn:
        raise RunTimeValueError(
            f"tensor {self.name!r} is not iterable; use range({self.shape[0]}) and index it"
        )

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise RunTimeValueError(
            f"NumPy cannot read tensor {self.name!r}, whose values exist on the device only; use "
            "nisa instructions (tensor.numpy() is for debugging)"
        )

    def __bool__(self) -> bool:
        """True, as published kernels ask whether an optional tensor is there; RunTimeValueError
        for one element, whose value is meant.
        """
        layout = self.v.layout
        if layout.size == 1 and (layout.on_chip or self.storage.nbytes != layout.itemsize):
            raise RunTimeValueError(
                f"an element of tensor {self.name!r} is used as a Python condition, but its value "
                "exists on the device only; select with nisa.tensor_copy_predicated or a mask, or "
                "loop with nl.while_loop on a register; whether there is a tensor at all is "
                f"`tensor != None`{at_kernel_line()}"
            )
        return True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (NkiTensor, RunTimeValue, SupportsFloat)) and other is not self:
            self._no_operator()
        return other is self

    __hash__ = Strided.__hash__

    def _no_operator(self, *_: Any) -> NoReturn:
        raise RunTimeValueError(
            f"tensor {self.name!r} has no Python operators; use nisa.tensor_tensor for two tiles, "
            "nisa.tensor_scalar for a tile and a number or column (nl.add, nl.equal, ...), "
            f"nisa.nc_matmul for products{at_kernel_line()}"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _no_operator
    __truediv__ = __rtruediv__ = __floordiv__ = __mod__ = __pow__ = __matmul__ = _no_operator
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __and__ = __or__ = _no_operator

    def permute(self, dims: tuple[int, ...]) -> NkiTensor:
        """Reorder the dimensions; on chip dims[0] must be 0."""
        return views.permute(self, dims)

    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """Repeat a free dimension of size 1."""
        return views.broadcast(self, dim, size)

    def expand_dim(self, dim: int) -> NkiTensor:
        """Insert a dimension of size 1; on chip not at 0."""
        return views.expand_dim(self, dim)

    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Drop a free dimension of size 1."""
        return views.squeeze_dim(self, dim)

    def reshape_dim(self, dim: int, shape: tuple[int, ...]) -> NkiTensor:
        """Split one dimension; one size may be -1."""
        return views.reshape_dim(self, dim, shape)

    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Merge the dimensions start_dim..end_dim (inclusive), which must be contiguous."""
        return views.flatten_dims(self, start_dim, end_dim)

    def reshape(self, shape: tuple[int, ...]) -> NkiTensor:
        """Same elements in another shape, without copying."""
        return views.reshape(self, shape)

    def rearrange(
        self,
        src_pattern: tuple[Any, ...],
        dst_pattern: tuple[Any, ...],
        fixed_sizes: dict[str, int] | None = None,
    ) -> NkiTensor:
        """Split, reorder and merge dimensions by name, einops style."""
        return views.rearrange(self, src_pattern, dst_pattern, fixed_sizes)

    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Elements start, start + step, ... below end of one dimension."""
        return indexing.slice_dim(self, dim, start, end, step)

    def select(self, dim: int, index: int | NkiTensor) -> NkiTensor:
        """One element of a dimension, dropped; a tensor or register index is read at run time."""
        return indexing.select(self, dim, index)

    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """Row vector_offset[p] of an HBM tensor for each partition p."""
        return access_pattern.vector_select(self, dim, vector_offset)

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: NkiTensor | RunTimeValue | None = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: str | None = None,
    ) -> NkiTensor:
        """Explicit access pattern [[step, count], ...], outermost first, relative to this view."""
        return access_pattern.ap(
            self, pattern, offset, scalar_offset, vector_offset, indirect_dim, dtype
        )

    def view(self, dtype: str) -> NkiTensor:
        """The same bits as another dtype; the last dimension scales with the item size."""
        return views.reinterpret(self, dtype)

    def reinterpret_cast(self, dtype: str) -> NkiTensor:
        """Same as `view`."""
        return views.reinterpret(self, dtype)

    def indirect(self, index: NkiTensor, num_elem: int | None = None) -> NkiTensor:
        """Tensor indirection exists on trn3 only: NkiValidationError."""
        raise NkiValidationError(
            "NkiTensor.indirect exists on trn3 (NeuronCore-v4) only, the target is trn2; "
            "use .ap(vector_offset=...) with dma_copy"
        )


def handle(storage: Storage, view: View, dynamic: Dynamic | None = None) -> NkiTensor:
    """A tensor for an existing view."""
    made: NkiTensor = object.__new__(NkiTensor)
    made.storage = storage
    made.v = view
    made.dynamic = dynamic
    return made
