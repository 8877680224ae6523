"""What the tests of the kernels share."""

from typing import Any

import pytest

from segattn.kernels import backend
from segattn.tests.kernels.cases import Array


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """Flags [cores, H] of every launch of an attention kernel."""
    seen: list[Array] = []
    run = backend.run

    def recording(*args: Any) -> Any:
        result = run(*args)
        seen.append(result[-1])
        return result

    monkeypatch.setattr("segattn.kernels.backend.run", recording)
    return seen
