"""NKIObject, which the parser of NKI 0.6 wanted as the base of every class in a kernel.

NKI 0.7 takes any class. Libraries of 0.6 rely on how that parser built objects, so it stays.
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any


@cache
def _init_parameters(cls: Any) -> frozenset[str]:
    return frozenset(inspect.signature(cls.__init__).parameters)


class _NkiMeta(type):
    """Construction as the parser of 0.6 evaluated it.

    For dataclasses, keywords that are class attributes but not fields are set afterwards and
    missing required fields become None; a plain class takes keywords as attributes.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        described: Any = cls
        if not is_dataclass(described):
            return super().__call__(*args, **kwargs)
        # A dataclass may have written its own __init__, whose parameters are not the fields.
        names = _init_parameters(cls)
        init_fields = [f for f in fields(described) if f.init and f.name in names]
        late = {k: kwargs.pop(k) for k in list(kwargs) if k not in names and hasattr(cls, k)}
        for f in init_fields[len(args) :]:
            required = f.default is MISSING and f.default_factory is MISSING
            if required and f.name not in kwargs:
                kwargs[f.name] = None
        made = super().__call__(*args, **kwargs)
        for name, value in late.items():
            object.__setattr__(made, name, value)
        return made


class NKIObject(metaclass=_NkiMeta):
    """Base class of dataclasses and configuration objects in libraries of NKI 0.6."""

    __slots__ = ()

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            setattr(self, name, value)
