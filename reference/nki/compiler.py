"""`nki.compiler`: the records that `nki.jit` takes; there is no compiler here."""

from dataclasses import dataclass
from enum import Enum


class AddressRotation(Enum):
    """Whether the compiler moves allocations; AUTO leaves fixed addresses alone."""

    AUTO = "auto"
    ENABLE = "enable"
    DISABLE = "disable"


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Options of a compilation. None stands for the compiler's own choice.

    The interpreter runs a kernel the same under all of them: it checks barriers of two cores and
    the capacity of SBUF and PSUM by rules of its own (`core_race`, `capacity`).
    """

    address_rotation: AddressRotation = AddressRotation.AUTO
    non_ssa_legalization: bool | None = None
    dead_code_elim: bool | None = None
    barrier_check: bool | None = None
    prefetch_auto: bool = False
    nki_alloc_fallback: bool = True


@dataclass(frozen=True, kw_only=True)
class SpecializationConfig:
    """Options of tracing a kernel."""

    allow_nested_config_override: bool = False


def __getattr__(name: str) -> object:
    """Raise AttributeError that says why there is nothing."""
    raise AttributeError(
        f"nki.compiler.{name}: the interpreter has no compiler; the real nki package from AWS has"
    )
