"""The scheduler under test: a class, its kind, and how its instances are made."""

import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import (
    AsyncScheduler,
    NeuronAsyncScheduler,
    NeuronPolicy,
    NeuronScheduler,
    Scheduler,
    SchedulerConfig,
)

OWN: dict[str, type[Scheduler]] = {
    "base": Scheduler,
    "async": AsyncScheduler,
    "neuron": NeuronScheduler,
    "neuron_async": NeuronAsyncScheduler,
}
KINDS = tuple(OWN)


@dataclass(frozen=True)
class Subject:
    """A scheduler class and what it promises.

    name: "package.module:Class". kind: "base" (vLLM's rules), "neuron" (also: one kind of work in a
    step, one prefill at a time, padded counts), "async" and "neuron_async" (the same, with two
    steps in flight).
    """

    name: str
    cls: type
    kind: str = "neuron"

    @classmethod
    def own(cls, kind: str) -> "Subject":
        """Our own scheduler of a kind."""
        return cls(f"segattn.scheduler:{OWN[kind].__name__}", OWN[kind], kind)

    @classmethod
    def load(cls, name: str, kind: str = "neuron") -> "Subject":
        """Import a class by name, from the current folder too. ValueError when there is none."""
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: must be one of {', '.join(KINDS)}")
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
        return cls(name, found, kind)

    @property
    def is_neuron(self) -> bool:
        """Whether the rules of the Neuron kinds hold."""
        return self.kind.startswith("neuron")

    @property
    def depth(self) -> int:
        """Steps that may be in flight."""
        return 2 if self.kind.endswith("async") else 1

    @property
    def takes_policy(self) -> bool:
        """Whether the constructor has a second argument, a NeuronPolicy."""
        return len(inspect.signature(self.cls).parameters) > 1

    @property
    def takes_throttle(self) -> bool:
        """Whether `schedule` has an argument, `throttle_prefills`."""
        schedule = getattr(self.cls, "schedule", None)
        return schedule is not None and len(inspect.signature(schedule).parameters) > 1

    @property
    def takes_failures(self) -> bool:
        """Whether a step can be taken back, by `step_failed(output, error)`."""
        return hasattr(self.cls, "step_failed")

    def make(self, config: SchedulerConfig, policy: Mapping[str, Any]) -> Any:
        """A fresh scheduler: `Class(config, policy)` where that is what it takes."""
        if self.takes_policy:
            return self.cls(config, NeuronPolicy(**policy))
        return self.cls(config)
