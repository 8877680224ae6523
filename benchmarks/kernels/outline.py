"""The outline of a kernel: its program for given shapes, without data.

The kernel's Python runs on the interpreter's cores with instructions that only account for their
operands. Registers hold 0; the body of every dynamic loop is walked several times, whatever its
bounds, because tiles live from one trip into the next, and counts once. So every branch of the
program is there, fallbacks that hardly ever run too, and a walk takes about as long as a compiler's
would.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import isfunction, signature
from typing import Any
from unittest import mock

from segattn.reference.nki import isa, language
from segattn.reference.nki.arguments import Arguments
from segattn.reference.nki.core import RUN, Core
from segattn.reference.nki.isa.execute import account
from segattn.reference.nki.isa.scalars import NkiScalar
from segattn.reference.nki.memory import check_capacity, fullest_moment
from segattn.reference.nki.regions import PSUM, SBUF
from segattn.reference.nki.registers import VirtualRegister
from segattn.reference.nki.tensor import NkiTensor

WRITTEN = ("dst", "reduce_res")
"""How parameters begin that an instruction writes."""


TRIPS = 3
"""Trips of a dynamic loop: what one trip leaves to the next, that leaves to the one after it."""


@dataclass(frozen=True)
class Outline:
    """One core's program, the larger one of two."""

    kernel: str
    sbuf_bytes: int
    """Most bytes per partition that are live at once."""
    num_instructions: int
    """After unrolling: bodies of dynamic loops count once."""
    num_loops: int
    """Dynamic loops of the program."""


class _Walk:
    """Counts the instructions of one core."""

    def __init__(self) -> None:
        self.num_instructions = 0
        self.num_loops = 0
        self.repeating = 0  # trips under way that are not the first of their loop

    def instruction(self, function: Callable[..., Any]) -> Callable[..., None]:
        """A stand-in of an instruction, which takes the same arguments."""
        names = list(signature(function).parameters)
        written = {name for name in names if name.startswith(WRITTEN)}

        def stand_in(*args: Any, **kwargs: Any) -> None:
            operands = {**dict(zip(names, args, strict=False)), **kwargs}
            tensors = [(n, t) for n, t in operands.items() if isinstance(t, NkiTensor)]
            account(
                tuple([t for n, t in tensors if n in written]),
                tuple([t for n, t in tensors if n not in written]),
            )
            self.num_instructions += not self.repeating

        return stand_in

    def load(self, dst: VirtualRegister, src: NkiTensor) -> None:
        """register_load: the value is unknown, 0 stands for it."""
        account((), (src,))
        self.num_instructions += not self.repeating
        dst.set(0, "nisa.register_load")

    def load_scalar(self, src: NkiTensor) -> NkiScalar:
        """scalar_load: the value is unknown, 0 stands for it."""
        account((), (src,))
        self.num_instructions += not self.repeating
        return NkiScalar(0, src.dtype)

    def loop(
        self, lower: Any, upper: Any, body_fun: Callable[[Any], object], step: int = 1
    ) -> None:
        """fori_loop: TRIPS trips."""
        registers = any(isinstance(bound, VirtualRegister) for bound in (lower, upper))
        self.num_loops += not self.repeating
        for trip in range(TRIPS):
            self.repeating += trip > 0
            body_fun(VirtualRegister(0, frozen=True) if registers else NkiScalar(0))
            self.repeating -= trip > 0


KEPT = ("register_alloc", "register_move", "get_nc_version", "get_nc_sub_version")
"""Functions of nisa that work without data."""


@contextmanager
def _walking(walk: _Walk) -> Iterator[None]:
    functions = {name: getattr(isa, name) for name in isa.__all__}
    stand_ins: dict[str, Any] = {
        name: walk.instruction(function)
        for name, function in functions.items()
        if isfunction(function) and name not in KEPT
    }
    stand_ins["register_load"] = walk.load
    stand_ins["scalar_load"] = walk.load_scalar
    with (
        mock.patch.multiple(isa, **stand_ins),
        mock.patch.object(language, "fori_loop", walk.loop),
    ):
        yield


def outline(kernel: Any, num_cores: int, *args: Any) -> Outline:
    """The outline of a `@nki.jit` kernel that uses nisa instructions and fori_loop.

    Arrays among the arguments give shapes and dtypes only. CapacityError if the program needs more
    PSUM than there is.
    """
    most_bytes = most_instructions = most_loops = 0
    for index in range(num_cores):
        walk, core = _Walk(), Core(index, num_cores, num_cores > 1)
        arguments = Arguments()
        bound = [arguments.bind(value) for value in args]
        RUN.core = core
        try:
            with _walking(walk):
                kernel.function(*bound)
        finally:
            RUN.core = None
        check_capacity(PSUM, core.uses[PSUM])
        live = [use for use in core.uses[SBUF] if use.first >= 0]
        most_bytes = max(most_bytes, fullest_moment(live)[0])
        most_instructions = max(most_instructions, walk.num_instructions)
        most_loops = max(most_loops, walk.num_loops)
    return Outline(kernel.function.__name__, most_bytes, most_instructions, most_loops)


def outline_call(function: Callable[..., Any], **arguments: Any) -> Outline:
    """The outline of the kernel that a host function of `segattn.kernels` would launch."""
    kernels = import_module("segattn.kernels")
    launch = getattr(kernels, f"prepare_{function.__name__}")(**arguments)
    return outline(launch.kernel, launch.grid, *launch.arrays)
