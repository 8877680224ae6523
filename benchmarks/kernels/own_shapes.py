"""Attention shapes of one's own on the command line: one row for each combination of the values."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from segattn.benchmarks.kernels.targets import Target
from segattn.benchmarks.kernels.workloads import Decode, Prefill, Workload

SOFTMAX = ("auto", "bounded", "exact")


def numbers(text: str) -> list[int]:
    """Parse `A,B,...`, all at least 0."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 0:
        raise ValueError
    return values


numbers.__name__ = "list of numbers separated by commas"  # what argparse calls it in errors


@dataclass(frozen=True)
class OwnShape:
    """A workload with options of its function, in float32 if asked for."""

    workload: Prefill | Decode
    options: tuple[tuple[str, Any], ...]
    float32: bool = False
    cache: Any = None
    """Dtype of the caches, of one byte, with scales of 1; None: that of the workload."""

    @property
    def label(self) -> str:
        """That of the workload and what differs."""
        options = [
            f"{name} {v:g}" if isinstance(v, float) else v if isinstance(v, str) else f"{name}={v}"
            for name, v in self.options
        ]
        types = ["float32"] if self.float32 else []
        types += [] if self.cache is None else [f"{np.dtype(self.cache)} cache"]
        return ", ".join([self.workload.label, *types, *options])

    @property
    def kernel(self) -> str:
        """Name of the public function."""
        return self.workload.kernel

    @property
    def model_flops(self) -> float:
        """As in any dtype."""
        return self.workload.model_flops

    @property
    def model_bytes(self) -> float:
        """Twice as many in float32."""
        return self.workload.model_bytes * (2 if self.float32 else 1)

    def arguments(self, rng: np.random.Generator) -> dict[str, Any]:
        """Those of the workload, in the dtype."""
        arguments = self.workload.arguments(rng)
        if self.float32:
            arguments = {
                name: value.astype(np.float32)
                if getattr(value, "dtype", None) == ml_dtypes.bfloat16
                else value
                for name, value in arguments.items()
            }
        if self.cache is not None:
            for name in ("k_cache", "v_cache"):
                arguments[name] = np.nan_to_num(arguments[name].astype(np.float32)).astype(
                    self.cache
                )
            arguments |= {"k_scale": 1.0, "v_scale": 1.0}
        return arguments | dict(self.options)


def add_shape_options(parser: ArgumentParser) -> None:
    """Options that replace the rows of the table; lists are combined."""
    group = parser.add_argument_group("shapes of one's own", "lists give a row per combination")
    group.add_argument("--rows", type=numbers, help="prefill: new tokens")
    group.add_argument("--prior", type=numbers, default=[0], help="prefill: cached tokens (0)")
    group.add_argument("--batch", type=numbers, help="decode: requests")
    group.add_argument("--context", type=numbers, default=[2048], help="decode: tokens (2048)")
    group.add_argument("--heads", type=int, default=4, help="query heads (4)")
    group.add_argument("--kv-heads", type=int, default=1, help="KV heads (1)")
    group.add_argument("--head-dim", type=int, default=128, help="(128)")
    group.add_argument("--block-size", type=int, default=32, help="tokens per block (32)")
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float32", "fp8"),
        default="bfloat16",
        help="fp8: of the cache (bfloat16)",
    )
    group.add_argument("--window", type=int, help="sliding window")
    group.add_argument("--softmax", choices=SOFTMAX, help="of prefills (auto)")
    group.add_argument("--softcap", type=float, help="cap of the scores")


def own_targets(options: Namespace) -> list[Target]:
    """Rows for the options, without a target to miss; none when no shape is given.

    ValueError naming the option for sizes that no attention has.
    """
    for name in ("heads", "kv_heads", "head_dim", "block_size", "window"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')}={value}: must be at least 1")
    for name in ("rows", "batch", "context"):
        if 0 in (getattr(options, name) or ()):
            raise ValueError(f"--{name}: every number must be at least 1")
    sizes = {
        "q_heads": options.heads,
        "kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "block_size": options.block_size,
        "window": options.window,
        "fp8": options.dtype == "fp8",
    }
    float32 = options.dtype == "float32"
    cap = (("softcap", options.softcap),) if options.softcap else ()
    softmax = (("softmax", options.softmax),) if options.softmax else ()
    works: list[tuple[Workload, str]] = [
        (OwnShape(Prefill(rows, prior, **sizes), (*softmax, *cap), float32), "mfu")
        for rows, prior in product(options.rows or (), options.prior)
    ]
    works += [
        (OwnShape(Decode(batch, context, **sizes), cap, float32), "hbm")
        for batch, context in product(options.batch or (), options.context)
    ]
    return [Target(work, 0.0, metric) for work, metric in works]
