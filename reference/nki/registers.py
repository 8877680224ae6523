"""Virtual registers: 32-bit scalars of an engine's sequencer, held as Python ints."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex

from .errors import NkiValidationError, UninitializedReadError
from .nkiobject import NKIObject
from .records import Access
from .serial import new_serial

if TYPE_CHECKING:
    from collections.abc import Callable


class VirtualRegister(NKIObject):
    """A 32-bit register; `state` None means not initialised, `frozen` a loop's induction value."""

    __slots__ = ("_access", "frozen", "state")

    def __init__(self, state: int | None = None, frozen: bool = False) -> None:
        self.state = None if state is None else _wrap(state)
        self.frozen = frozen
        self._access: Access | None = None

    @property
    def access(self) -> Access:
        """The register as the trace records it."""
        if self._access is None:
            self._access = Access(new_serial(), "register", "int32", 4, 0, 0, (1,), (4,))
        return self._access

    def __index__(self) -> int:
        """The value now."""
        if self.state is None:
            raise UninitializedReadError(
                "a register is read before register_move or register_load set it"
            )
        return self.state

    __int__ = __index__

    def __bool__(self) -> bool:
        return self.__index__() != 0

    def set(self, value: int, instruction: str) -> None:
        """Assign; NkiValidationError for the induction register of a loop."""
        if self.frozen:
            raise NkiValidationError(
                f"{instruction}: dst is the induction register of a loop, which is read only; "
                "copy it with register_alloc and register_move first"
            )
        self.state = _wrap(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SupportsIndex) and self.__index__() == other.__index__()

    __hash__ = None  # type: ignore[assignment]  # a mutable value is not a key

    def _combine(self, other: SupportsIndex, how: Callable[[int, int], int]) -> VirtualRegister:
        if not isinstance(other, SupportsIndex):
            return NotImplemented
        result = VirtualRegister(how(self.__index__(), other.__index__()))
        # Registers have no arithmetic instruction to record: the sum waits for what set `self`.
        result._access = self.access
        return result

    def __lt__(self, other: SupportsIndex) -> bool:
        return self.__index__() < other.__index__()

    def __le__(self, other: SupportsIndex) -> bool:
        return self.__index__() <= other.__index__()

    def __gt__(self, other: SupportsIndex) -> bool:
        return self.__index__() > other.__index__()

    def __ge__(self, other: SupportsIndex) -> bool:
        return self.__index__() >= other.__index__()

    def __add__(self, other: SupportsIndex) -> VirtualRegister:
        return self._combine(other, lambda a, b: a + b)

    def __radd__(self, other: SupportsIndex) -> VirtualRegister:
        return self._combine(other, lambda a, b: b + a)

    def __sub__(self, other: SupportsIndex) -> VirtualRegister:
        return self._combine(other, lambda a, b: a - b)

    def __rsub__(self, other: SupportsIndex) -> VirtualRegister:
        return self._combine(other, lambda a, b: b - a)

    def __mul__(self, other: SupportsIndex) -> VirtualRegister:
        return self._combine(other, lambda a, b: a * b)

    def __rmul__(self, other: SupportsIndex) -> VirtualRegister:
        return self._combine(other, lambda a, b: b * a)

    def __floordiv__(self, other: SupportsIndex) -> VirtualRegister:
        return self._combine(other, lambda a, b: a // b)

    def __mod__(self, other: SupportsIndex) -> VirtualRegister:
        return self._combine(other, lambda a, b: a % b)

    def __repr__(self) -> str:
        return f"VirtualRegister({self.state})"


def _wrap(value: int) -> int:
    """The low 32 bits as a signed integer."""
    return (int(value) + 2**31) % 2**32 - 2**31
