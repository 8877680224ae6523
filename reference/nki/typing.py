"""`nki.typing`: annotations that declare the shapes of kernel arguments."""

from dataclasses import dataclass

from .errors import NkiValidationError


@dataclass(frozen=True)
class TensorShape:
    """What `tensor[128, 512]` means: the shape that an argument must have."""

    shape: tuple[int, ...]

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise NkiValidationError when an argument has another shape."""
        if shape != self.shape:
            raise NkiValidationError(
                f"argument {name!r} has shape {shape}; the kernel declares {self.shape}"
            )


class _Subscriptable(type):
    def __getitem__(cls, shape: int | tuple[int, ...]) -> TensorShape:
        """Return the annotation for a shape; raises TypeError if a size is not an int."""
        sizes = shape if isinstance(shape, tuple) else (shape,)
        for size in sizes:
            if not isinstance(size, int):
                raise TypeError(f"nki.typing.tensor[{sizes}]: sizes are integers, not {size!r}")
        return TensorShape(sizes)


class tensor(metaclass=_Subscriptable):  # noqa: N801  # NKI's name
    """Annotation of a tensor argument; `tensor[128, 512]` declares its shape."""


class mutable_tensor(metaclass=_Subscriptable):  # noqa: N801  # NKI's name
    """Annotation of a tensor argument that the kernel writes."""
