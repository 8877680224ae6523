"""The kernels of nki-samples and of aws-neuron-sdk's documentation, with what they compute."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from segattn.tests.checks.peers.results import Comparison, PeerMismatchError, compare, run_kernel

Array = npt.NDArray[Any]
_MATMULS = (
    "nki_matmul_tiled_",
    "nki_matmul_hoist_load_",
    "nki_matmul_block_free_dimension_",
    "nki_matmul_fully_optimized_",
)


@dataclass(frozen=True)
class Example:
    """One case; `run` raises if the kernel fails or differs."""

    kernel: str
    case: str
    run: Callable[[Comparison], None]


def nki_samples_examples(root: Path) -> list[Example]:
    """Return the cases of nki-samples: the tutorial written for this NKI."""
    folder = root / "src" / "nki_samples" / "tutorials" / "matrix_multiplication"
    return _matmul_examples(folder / "matrix_multiplication_nki_kernels.py")


def neuron_sdk_examples(root: Path) -> list[Example]:
    """Return the cases of aws-neuron-sdk `nki/examples`."""
    folder = root / "nki" / "examples"
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((256, 1024)).astype(np.float32)
    row = rng.standard_normal((128, 512)).astype(np.float32)
    image = rng.standard_normal((16, 12, 18)).astype(np.float32)
    flat = rng.standard_normal((5, 37 * 44)).astype(np.float32)
    columns = rng.standard_normal((4, 5)).astype(np.float32)
    examples = _matmul_examples(
        folder / "matrix_multiplication" / "matrix_multiplication_nki_kernels.py"
    )
    examples += _mamba_examples(folder / "fused_mamba")
    simple: list[tuple[str, str, tuple[Any, ...], Callable[..., Any]]] = [
        ("tensor_addition/tensor_addition_nki_kernels.py", "nki_tensor_add", (wide, wide), np.add),
        ("getting_started_baremetal.py", "nki_tensor_add_kernel", (row, row), np.add),
        ("getting_started_jax.py", "nki_tensor_add_kernel", (row, row), np.add),
        ("getting_started_torch.py", "nki_tensor_add_kernel", (row, row), np.add),
        ("layout-pass.py", "tensor_exp_kernel_", (row,), np.exp),
        (
            "transpose2d/transpose2d_nki_kernels.py",
            "tensor_transpose2D_kernel_",
            (flat, (37, 44)),
            _transpose_rows,
        ),
        (
            "average_pool2d/average_pool2d_nki_kernels.py",
            "tensor_avgpool_kernel",
            (image, 3),
            partial(_pool, np.mean),
        ),
        ("index-case-1.py", "tensor_split_kernel_", (columns,), _even_and_odd),
        ("index-case-3.py", "tensor_maxpool_kernel_", (image, 3), partial(_pool, np.max)),
    ]
    for file, function, arguments, reference in simple:
        run = partial(_run, folder / file, function, arguments, reference)
        examples.append(Example(Path(file).stem, function, run))
    script = folder / "simulate" / "nki_simulate_example.py"
    examples.append(Example("nki_simulate_example", "script", lambda _: _unused(_load(script))))
    violation = partial(_expect_refusal, folder / "layout-violation.py")
    examples.append(Example("layout-violation", "is refused", violation))
    return examples


def _unused(_: object) -> None:
    """The script checks its own result while it is loaded."""


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def _run(
    path: Path,
    function: str,
    arguments: Sequence[Any],
    reference: Callable[..., Any],
    comparison: Comparison,
    tolerance: float = 1e-5,
) -> None:
    kernel = getattr(_load(path), function)
    (outputs,) = run_kernel(kernel, [arguments], 1, comparison)
    expected = reference(*arguments)
    references = expected if isinstance(expected, tuple) else (expected,)
    for number, (actual, wanted) in enumerate(zip(outputs, references, strict=True)):
        compare(f"output {number}", actual, wanted, tolerance, tolerance, comparison)


def _matmul_examples(path: Path) -> list[Example]:
    rng = np.random.default_rng(0)

    def product(lhs_t: Array, rhs: Array) -> Array:
        return lhs_t.T.astype(np.float32) @ rhs.astype(np.float32)

    examples = []
    for function in ("nki_matmul_basic_", *_MATMULS):
        m, k, n = (64, 128, 512) if function == "nki_matmul_basic_" else (2048, 1024, 1024)
        arguments = (
            rng.standard_normal((k, m)).astype(np.float32),
            rng.standard_normal((k, n)).astype(np.float32),
        )
        run = partial(_run, path, function, arguments, product, tolerance=1e-4)
        examples.append(Example("matrix_multiplication", f"{function} {m}x{k}x{n}", run))
    return examples


def _mamba_examples(folder: Path) -> list[Example]:
    rng = np.random.default_rng(0)
    channels, states, length = 256, 8, 512
    delta = rng.uniform(0.1, 1.0, (1, channels, length)).astype(np.float32)
    u = rng.standard_normal((1, channels, length)).astype(np.float32)
    a = -rng.uniform(0.5, 1.5, (channels, states)).astype(np.float32)
    b = rng.standard_normal((1, states, length)).astype(np.float32)
    c = rng.standard_normal((1, states, length)).astype(np.float32)

    def reference(delta: Array, u: Array, a: Array, b: Array, c: Array) -> Array:
        import torch

        layer = _load(folder / "mamba_torch.py").mamba_layer
        tensors = [torch.from_numpy(array) for array in (delta, a, b, u, c)]
        result: Array = layer(*tensors).numpy()
        return result

    examples = []
    for function in ("mamba_v1", "mamba_v2", "mamba_v3"):
        path = folder / "mamba_nki_kernels.py"
        run = partial(_run, path, function, (delta, u, a, b, c), reference, tolerance=1e-3)
        examples.append(Example("fused_mamba", function, run))
    return examples


def _transpose_rows(flat: Array, shape: tuple[int, int]) -> Array:
    return flat.reshape(-1, *shape).transpose(0, 2, 1).reshape(flat.shape)


def _pool(reduce: Callable[..., Any], image: Array, size: int) -> Array:
    channels, height, width = image.shape
    windows = image.reshape(channels, height // size, size, width // size, size)
    pooled: Array = reduce(windows, axis=(2, 4))
    return pooled


def _even_and_odd(columns: Array) -> tuple[Array, Array]:
    return columns[:, 0::2], columns[:, 1::2]


def _expect_refusal(path: Path, comparison: Comparison) -> None:
    """The documentation shows this kernel as one that does not compile (256 partitions)."""
    kernel = _load(path).tensor_exp_kernel_
    image = np.ones((256, 512), np.float32)
    try:
        run_kernel(kernel, [[image]], 1, comparison)
    except Exception:  # any refusal will do
        return
    raise PeerMismatchError("accepted, although it has 256 partitions")
