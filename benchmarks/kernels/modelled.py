"""Runs a workload on the interpreter with a trace and models it. Nothing here is measured."""

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from segattn.benchmarks.kernels.workloads import Workload
from segattn.reference.nki.cost.constants import BANDS, BASE, CostConstants, variant
from segattn.reference.nki.cost.needs import Needs, needs
from segattn.reference.nki.cost.result import CostResult, Evaluator
from segattn.reference.nki.trace import Launch, Trace

Functions = Mapping[str, Callable[..., Any]]

COLUMNS = (*BANDS, "whole tensors")
"""Names of the modelled times of a workload: the bands, and what one tracking unit for each tensor
would cost at base."""


@dataclass(frozen=True)
class Modelled:
    """Modelled times of one call, all its launches together."""

    label: str
    kernel: str
    num_cores: int
    model_flops: float
    model_bytes: float
    us: dict[str, float]
    """Modelled time by band or sensitivity, without what launching costs."""
    bound_by: str
    """Engine with the most busy time."""
    utilisation: dict[str, float]
    """Busiest core's share per engine, base constants."""
    num_launches: int
    needs: Needs
    """Of the longest launch, from a trace as far as it ran."""
    dma_efficiency: float
    roofs: dict[str, float] = field(default_factory=dict)
    """Machine bounds of the problem in us: "compute" and "hbm"."""

    def mfu(self, column: str = "base") -> float:
        """Share of the bf16 peak of the cores used."""
        return self.roofs["compute"] / self.us[column]

    def hbm_share(self, column: str = "base") -> float:
        """Share of the HBM rate of the cores used, counting what the problem needs."""
        return self.roofs["hbm"] / self.us[column]

    def as_json(self) -> dict[str, Any]:
        """Plain values for a results file."""
        return asdict(self)


def public_functions() -> Functions:
    """The kernels' host functions by name, on the interpreter.

    RuntimeError if `segattn.kernels` was imported before with another backend.
    """
    os.environ["SEGATTN_BACKEND"] = "interpreter"
    kernels = importlib.import_module("segattn.kernels")
    backend = importlib.import_module("segattn.kernels.backend").BACKEND
    if backend != "interpreter":
        raise RuntimeError(f"the kernels run on {backend!r} in this process, not the interpreter")
    names = ("padded_prefill", "segmented_attention", "paged_decode", "write_kv_cache")
    return {name: getattr(kernels, name) for name in names}


def record(workload: Workload, functions: Functions, **options: Any) -> list[Launch]:
    """Run a workload on the interpreter; the launches that it made.

    RuntimeError if nothing was recorded: the functions do not run on the interpreter.
    """
    arguments = workload.arguments(np.random.default_rng(0))
    with Trace() as trace:
        functions[workload.kernel](**arguments, **options)
    if not trace.launches:
        raise RuntimeError(f"{workload.kernel} recorded nothing: it did not run on the interpreter")
    return trace.launches


def model(
    workload: Workload,
    launches: list[Launch],
    columns: tuple[str, ...] = COLUMNS,
    base: CostConstants = BASE,
) -> tuple[Modelled, list[CostResult]]:
    """Model recorded launches; also the base results, for timelines."""
    us = dict.fromkeys(columns, 0.0)
    results = []
    for launch in launches:
        evaluator = Evaluator(launch)
        results.append(evaluator.evaluate(base))
        for column in columns:
            plain = column == "base"
            result = results[-1] if plain else evaluator.evaluate(variant(column, base))
            us[column] += result.modelled_us
    longest = max(results, key=lambda r: r.modelled_ns)
    core, engine = longest.bounding_engine
    cores = launches[0].num_cores
    executed = sum(r.dma.engine_ns for r in results)
    payload = sum(r.dma.nbytes for r in results)
    modelled = Modelled(
        workload.label,
        workload.kernel,
        cores,
        workload.model_flops,
        workload.model_bytes,
        us,
        engine,
        {name: longest.utilisation[core, name] for c, name in longest.busy_ns if c == core},
        len(launches),
        needs(longest),
        payload / base.dma_documented_engine_rate / executed if executed else 0.0,
        {
            "compute": workload.model_flops / base.peak_flops_per_ns / cores / 1e3,
            "hbm": workload.model_bytes / base.hbm_rate / cores / 1e3,
        },
    )
    return modelled, results
