"""The real model, read once for all tests that need it."""

import pytest

from segattn.runner.checkpoint import Checkpoint
from segattn.runner.llama import Llama
from segattn.runner.loading import default_model_path, load_checkpoint


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Checkpoint:
    """SmolLM2-135M-Instruct as it lies in the model package."""
    return load_checkpoint(default_model_path())


@pytest.fixture(scope="session")
def smollm2(smollm2_checkpoint: Checkpoint) -> Llama:
    """The same, ready to run in float32."""
    return Llama(smollm2_checkpoint.config, smollm2_checkpoint.weights)
