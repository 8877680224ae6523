"""A strided view of a storage: its shape, its run-time address, and views derived from it."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from .nkiobject import NKIObject
from .regions import MemoryRegion
from .registers import RunTimeValue
from .rules.views import MAX_DIMS, check_rank
from .storage import Storage
from .view import View


class Dynamic:
    """A run-time address: `index * step` elements are added to the view's offset.

    `index` is a run-time value or a one-element SBUF tensor (scalar), or with `vector` an SBUF
    tensor with one index per row of dimension 0. `dim` is the view dimension that took part, -1
    none, `last` the largest index that a static one could be, -1 where only the end counts.
    """

    __slots__ = ("dim", "index", "last", "step", "vector")

    def __init__(
        self,
        index: RunTimeValue | Strided,
        step: int,
        *,
        vector: bool,
        dim: int,
        last: int = -1,
    ) -> None:
        self.index = index
        self.step = step
        self.vector = vector
        self.dim = dim
        self.last = last


class Strided(NKIObject):
    """Elements of a storage, maybe at a run-time address; views share the storage."""

    __slots__ = ("dynamic", "storage", "v")

    storage: Storage
    v: View
    dynamic: Dynamic | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""
        return self.v.layout.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Steps in elements of the flat storage."""
        return self.v.layout.strides

    @property
    def offset(self) -> int:
        """First element, counted in the flat storage."""
        return self.v.offset

    @property
    def dtype(self) -> str:
        """NKI dtype name."""
        return self.v.layout.dtype

    @property
    def buffer(self) -> MemoryRegion:
        """The memory region."""
        return self.storage.region

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.v.layout.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.v.layout.size

    @property
    def name(self) -> str:
        """Debug name."""
        return self.storage.name

    def derive(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int | None = None
    ) -> Self:
        """The same storage, dtype and run-time address with another pattern (offset None: same)."""
        if len(shape) > MAX_DIMS:
            check_rank(f"a view of {self.name!r}", shape, self.v.layout.on_chip)
        made = object.__new__(type(self))
        made.storage = storage = self.storage
        made.v = storage.view(
            self.v.layout.dtype, shape, strides, self.v.offset if offset is None else offset
        )
        made.dynamic = self.dynamic
        return made

    def on(self, view: View, dynamic: Dynamic | None) -> Self:
        """Another view of the same storage."""
        made = object.__new__(type(self))
        made.storage = self.storage
        made.v = view
        made.dynamic = dynamic
        return made

    def unusable(self, error: Exception) -> Self:
        """A pattern outside the tensor: a kernel may make one, every use raises `error`."""
        without: Any = _NoView(error)
        return self.on(without, None)


class _NoView:
    """In place of a view that does not exist: reading anything of it raises `error`."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self.error
