"""Whether every trip of a dynamic loop runs the same instructions.

The device holds a loop's body once, as the compiler traced it. A body that Python state makes run
otherwise in a later trip (a counter, a list that grows, a tile of the trip before) computes
something else there. So each instruction of the first trip is kept as the kernel's line and the
arguments that are fixed when the body is traced, and those of later trips are compared with it:
numbers, operators, shapes, offsets, and which tensors and registers, those that the body makes
counted in the order of their use.

Kernels take scratch tiles from a ring by a Python counter. A trip may therefore use other tiles on
the chip than the first one, one for one, if it writes them before it reads them; what they hold
after the loop is not what the device has and counts as not written. What the trips after the first
change in lists, objects and variables around the body is undone when the loop ends, unless rule
purity is off, for those who collect values outside of the kernel.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any, Final

import numpy as np

from .errors import called_from_kernel
from .outside import Outside, noted
from .regions import ON_CHIP
from .serial import new_serial
from .storage import Storage, Watch
from .strict import level, violation
from .view import GapOrigin, View

_VALUES: Final = frozenset({int, float, bool, str, type(None), np.float32, np.int64})
_CONSTANTS: Final = frozenset({"shared_identity_matrix", "shared_constant"})

Named = tuple[object, Storage | None, View | None]
"""A tensor or register: what it is called in its trip, and for a tensor its memory."""
Step = tuple[tuple[Any, ...], list[Named]]
"""An instruction: code, line and fixed arguments, and the tensors and registers among them."""


class _Ended(Watch):
    """Of a tile that the body of a dynamic loop declared, after the loop."""

    __slots__ = ("before", "loop")

    def __init__(self, loop: str, before: Watch | None) -> None:
        self.loop = loop
        self.before = before

    def before_read(
        self,
        storage: Storage,
        view: View,
        instruction: str,
        operand: str,
        rows: Any = None,
    ) -> None:
        """Rule loop_state."""
        self._report(storage, f"{instruction}: operand {operand}")
        if self.before is not None:
            self.before.before_read(storage, view, instruction, operand, rows)

    def before_write(
        self, storage: Storage, view: View, instruction: str, rows: Any = None
    ) -> None:
        """Rule loop_state."""
        self._report(storage, f"{instruction}: dst")
        if self.before is not None:
            self.before.before_write(storage, view, instruction, rows)

    def _report(self, storage: Storage, where: str) -> None:
        violation(
            "loop_state",
            f"{where} {storage.name!r} was declared in the body of {self.loop}, which has ended; "
            "declare it before the loop",
        )


class Trips:
    """The trips of one running dynamic loop."""

    __slots__ = (
        "adds", "after", "back", "born", "first", "local", "loop", "made", "names",
        "number", "outer", "replaced", "reported", "start", "traced", "written",
    )  # fmt: skip

    def __init__(self, loop: str, outer: Trips | None = None) -> None:
        self.loop = loop
        self.outer = outer
        self.born = new_serial()
        self.first: list[Step] = []
        """The instructions of the first trip."""
        self.adds: dict[int, bool | None] = {}
        """Whether a matmul of the first trip that leaves it to the compiler added, by its place."""
        self.number = -1
        self.after = 0
        """Instructions of the current trip so far."""
        self.start = 0
        self.local: dict[int, int] = {}
        """Number of each tensor and register that this trip made, by its birth."""
        self.names: dict[object, object] = {}
        """What this trip uses for each tensor and register of the first, and the reverse."""
        self.back: dict[object, object] = {}
        self.written: set[int] = set()
        """Births of the tiles that this trip has written in place of others."""
        self.made: dict[int, weakref.ref[Storage]] = {}
        """Tiles on the chip that the body declares, by their birth."""
        self.replaced: list[tuple[Storage, View, GapOrigin]] = []
        self.traced: Outside | None = None
        """The Python state around the body after the first trip."""
        self.reported = False

    def begin_trip(self, body: Callable[..., object]) -> None:
        """The trip before, if any, is complete, and another begins."""
        self._check_complete()
        if self.number == 0 and level("purity") != "off":
            self.traced = noted(body)
        self.number += 1
        self.after = 0
        self.start = new_serial()
        for state in (self.local, self.names, self.back, self.written):
            state.clear()

    def end(self) -> None:
        """The loop is over: what it left in tiles that trips exchanged is undefined.

        Tiles that its body declares do not exist any more, and lists and variables hold what one
        run of the body has left in them.
        """
        self._check_complete()
        if self.traced is not None:
            self.traced.restore()
        for made in self.made.values():
            storage = made()
            if storage is not None:
                storage.watch = _Ended(self.loop, storage.watch)
        for storage, view, origin in self.replaced:
            storage.forget_written(view, np.ones(view.layout.shape, np.bool_), origin)

    def carries(self, born: int) -> bool:
        """Whether a write of a register is carried from trip to trip of a nested loop."""
        return self.outer is not None and born < self.born

    def inferred(self, adds: bool | None) -> None:
        """A matmul with accumulate=None is about to run; whether it adds (None: to a part)."""
        if self.number == 0:
            self.adds[self.after] = adds
        elif self.adds.get(self.after, adds) is not adds:
            self._report(
                f"{'adds to' if adds else 'overwrites'} PSUM in a matmul with accumulate=None (say "
                "True or False)"
            )

    def _check_complete(self) -> None:
        """Report a trip with fewer instructions than the first."""
        if self.number > 0 and self.after < len(self.first):
            code, line = self.first[self.after][0][:2]
            self._report(f"ends before {code.co_name} of line {line}")

    def note(self, writes: tuple[Any, ...], reads: tuple[Any, ...]) -> None:
        """An instruction runs, called by the function that the kernel called."""
        entry, line = called_from_kernel()
        code = entry.f_code
        if code.co_name in _CONSTANTS:
            return
        variables = entry.f_locals
        named: list[Named] = []
        arguments = [
            self._described(variables[name], named) for name in code.co_varnames[: _arguments(code)]
        ]
        key = (code, line, *arguments)
        at = self.after
        self.after = at + 1
        if self.number == 0:
            self.first.append((key, named))
        elif at >= len(self.first):
            self._report(f"goes on with {code.co_name}")
        elif key != self.first[at][0]:
            self._report(_difference(entry, key, self.first[at][0]))
        else:
            self._compare_names(entry, named, self.first[at][1], writes, reads)

    def _described(self, value: Any, named: list[Named]) -> Any:
        """What is fixed of an argument when the body is traced."""
        kind = type(value)
        if kind in _VALUES:
            return value if value == value else "nan"  # NaN is not equal to itself
        if kind in (list, tuple):
            return tuple([self._described(v, named) for v in value])
        storage = getattr(value, "storage", None)
        if storage is not None:
            view, dynamic = value.v, value.dynamic
            name = self._name(storage.born)
            if type(name) is tuple and storage.region in ON_CHIP:
                self.made[storage.born] = weakref.ref(storage)
            named.append((name, storage if type(name) is int else None, view))
            return (
                view.layout,
                view.offset,
                storage.base if storage.in_arena else 0,
                None if dynamic is None else (self._described(dynamic.index, named), dynamic.step),
            )
        born = getattr(value, "born", None)
        if born is not None:
            named.append((self._name(born), None, None))
            return kind
        if kind is np.ndarray:
            return value.shape, value.tobytes()
        if kind is FunctionType:
            return value.__code__
        return value if value.__hash__ else kind

    def _name(self, born: int) -> object:
        if born < self.start:
            return born
        return "new", self.local.setdefault(born, len(self.local))

    def _compare_names(
        self,
        entry: FrameType,
        named: list[Named],
        first: list[Named],
        writes: tuple[Any, ...],
        reads: tuple[Any, ...],
    ) -> None:
        """Another tensor than in the first trip must be scratch that this trip writes first."""
        for (now, storage, view), (then, other, other_view) in zip(named, first, strict=True):
            one_for_one = (
                self.names.setdefault(then, now) == now and self.back.setdefault(now, then) == then
            )
            if one_for_one and now == then:
                continue
            if not one_for_one or storage is None or storage.region not in ON_CHIP or view is None:
                self._report(f"gives another tensor or register to {entry.f_code.co_name}")
                return
            if storage.born not in self.written and any(t.storage is storage for t in reads):
                self._report(
                    f"reads another tile in {entry.f_code.co_name}, {storage.name!r}, before it "
                    "writes it"
                )
                return
            if any(t.storage is storage for t in writes):
                self.written.add(storage.born)
                origin = GapOrigin(
                    f"{self.loop}: trip {self.number} wrote {storage.name!r} where the first trip "
                    "used another tile, as the device does in every trip",
                    *self._line(entry),
                )
                self.replaced.append((storage, view, origin))
                if other is not None and other_view is not None:
                    self.replaced.append((other, other_view, origin))

    def _line(self, entry: FrameType) -> tuple[str, int]:
        frame = entry.f_back or entry
        return frame.f_code.co_filename, frame.f_lineno

    def _report(self, what: str) -> None:
        if self.reported:
            return
        self.reported = True
        violation(
            "loop_state",
            f"{self.loop}: trip {self.number} {what}, unlike the first trip; the device runs the "
            "body as it was traced once: carry state in SBUF or HBM tensors or registers, not in "
            "Python, or unroll with range",
        )


def _arguments(code: Any) -> int:
    """How many of the variables of a function are its arguments."""
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return int(code.co_argcount + code.co_kwonlyargcount + stars)


def _difference(entry: FrameType, now: tuple[Any, ...], first: tuple[Any, ...]) -> str:
    """How an instruction differs from the one at its place in the first trip."""
    code, line = first[:2]
    if now[:2] != first[:2]:
        return f"runs {now[0].co_name} where {code.co_name} of line {line} ran"
    at = next(i for i in range(2, len(now)) if now[i] != first[i])
    name = code.co_varnames[at - 2]
    if type(now[at]) in _VALUES and type(first[at]) in _VALUES:
        return f"passes {name}={now[at]!r} to {code.co_name} instead of {first[at]!r}"
    shown = repr(entry.f_locals[name]).partition("\n")[0]
    return f"passes another {name} to {code.co_name} ({shown})"
