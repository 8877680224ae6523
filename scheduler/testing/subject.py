"""The scheduler under test: a class, and how its instances are made."""

import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import NeuronPolicy, SchedulerConfig


@dataclass(frozen=True)
class Subject:
    """A scheduler class and what it promises.

    name: "package.module:Class". neuron: one kind of work in a step, one prefill at a time, padded
    counts. policy: fields of NeuronPolicy for a class whose constructor takes one; its
    `max_consecutive_prefills` and `max_consecutive_decodes` are checked.
    """

    name: str
    cls: type
    neuron: bool = True
    policy: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls, name: str, *, neuron: bool = True, policy: Mapping[str, Any] | None = None
    ) -> "Subject":
        """Import a class by name, from the current folder too. ValueError when there is none."""
        module_name, separator, class_name = name.partition(":")
        if not separator:
            raise ValueError(f"scheduler {name!r}: must be package.module:Class")
        here = str(Path.cwd())
        sys.path.insert(0, here)
        try:
            found = getattr(importlib.import_module(module_name), class_name)
        except ImportError as error:
            raise ValueError(f"scheduler {name!r}: {error}") from error
        except AttributeError as error:
            raise ValueError(f"scheduler {name!r}: {module_name} has no {class_name!r}") from error
        finally:
            sys.path.remove(here)
        if not isinstance(found, type):
            raise ValueError(f"scheduler {name!r}: must be a class")
        NeuronPolicy(**(policy or {}))  # ValueError names what is wrong
        return cls(name, found, neuron, policy or {})

    def make(self, config: SchedulerConfig) -> Any:
        """A fresh scheduler: `Class(config, policy)` where that is what it takes."""
        if len(inspect.signature(self.cls).parameters) > 1:
            return self.cls(config, NeuronPolicy(**self.policy))
        return self.cls(config)
