"""Hypothesis profiles: `dev` (default), `ci`, and `deep` for a night of examples.

`ci` draws the same examples every time, so that a red run is the change's fault and can be
repeated; the others, and `segattn fuzz`, look for new ones.
Choose one with HYPOTHESIS_PROFILE. All are without deadline: no test judges by the clock.
"""

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Threads of BLAS gain nothing on tiles of 128 x 512, and wait for each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when NumPy is imported, which is later

for _name, _examples in {"dev": 25, "ci": 60, "deep": 2000}.items():
    settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,
        derandomize=_name == "ci",
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """For tests that watch calls: a collection would close generators of other tests then."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def no_nki_left_behind() -> Iterator[None]:
    """Another test's `install()` would refuse an `nki` that this test left in `sys.modules`."""
    yield
    left = [name for name in sys.modules if name.split(".")[0] in ("nki", "neuronxcc")]
    assert left == [], "the test registered these modules and did not remove them"


@pytest.fixture(autouse=True)
def no_level_left_behind() -> Iterator[None]:
    """A rule that stays at another level would change what the next test's kernel may do."""
    yield
    strict = sys.modules.get("segattn.reference.nki.strict")
    if strict is not None:
        left = {rule: strict.level(rule) for rule in strict.DEFAULT_LEVELS}
        assert left == strict.DEFAULT_LEVELS, "the test left rules at another level"
