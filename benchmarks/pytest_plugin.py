"""A pytest plugin: modelled times of NKI kernels as tests of a kernel repository.

    def test_scale(nki_model):
        call = nki_model(scale, x=np.ones((128, 512), np.float32))
        call.assert_no_regression("modelled.json", tolerance=0.02)

`pytest --nki-trace FOLDER` keeps a Perfetto timeline of every launch, `--nki-update` writes the
stored times anew. `nki_interpreter = true` in the configuration lets `import nki` find the
interpreter where AWS's nki is absent. Name the plugin in the configuration to use it:

    [pytest]
    addopts = -p segattn.benchmarks.pytest_plugin
    nki_interpreter = true

It is no entry point: pytest would rewrite the assertions of the whole package for every project
that finds it installed.
"""

# What is heavy is imported by the fixture.
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segattn.reference.extras import MissingExtraError

try:
    import pytest
except ImportError as error:
    raise MissingExtraError("pytest", "test") from error

if TYPE_CHECKING:
    from segattn.benchmarks.user_kernel import Modelled


def pytest_addoption(parser: pytest.Parser) -> None:
    """Two options, one setting."""
    group = parser.getgroup("nki", "modelled times of NKI kernels")
    group.addoption("--nki-trace", metavar="FOLDER", help="keep a timeline of every launch here")
    group.addoption("--nki-update", action="store_true", help="write the stored times anew")
    parser.addini("nki_interpreter", "import nki gives the interpreter", "bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Stand in for `nki` before any test module imports it."""
    if config.getini("nki_interpreter"):
        from segattn.reference import nki

        nki.install()


@dataclass(frozen=True)
class ModelledCall:
    """A modelled call of a kernel; all its launches together, none measured."""

    name: str
    """Of the test."""
    modelled: "Modelled"
    us: dict[str, float]
    """Modelled time by band."""
    update: bool

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What the call returned."""
        return self.modelled.outputs

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Numbers of each launch, as `segattn bench run --json` prints them."""
        return self.modelled.rows

    def assert_no_regression(
        self, stored: str | Path, *, band: str = "base", tolerance: float = 0.02
    ) -> None:
        """Fail when the call takes longer than the stored time and the tolerance.

        The file is JSON: name of the test -> band -> us. Without an entry the test fails too,
        unless `--nki-update` writes one.
        """
        from segattn.reference.json_files import read_object
        from segattn.reference.outputs import OutputFile

        path = Path(stored)
        known = read_object(path) if path.exists() else {}
        if self.update:
            OutputFile(path).save(json.dumps(known | {self.name: self.us}, indent=1) + "\n")
            return
        entry = known.get(self.name)
        if not isinstance(entry, dict) or not isinstance(entry.get(band), (int, float)):
            pytest.fail(f"{path} has no {band} time of {self.name!r}: run pytest --nki-update once")
        limit = entry[band] * (1 + tolerance)
        if self.us[band] > limit:
            pytest.fail(
                f"{self.name}: modelled {self.us[band]:.2f} us ({band}), stored "
                f"{entry[band]:.2f} us, at most {limit:.2f} us allowed"
            )


@pytest.fixture
def nki_model(request: pytest.FixtureRequest) -> Callable[..., ModelledCall]:
    """`nki_model(kernel, **arguments)` runs a kernel on the interpreter and models it."""
    from segattn.benchmarks.launch_summary import save_timeline
    from segattn.benchmarks.user_kernel import bound_arguments, model_call
    from segattn.reference.outputs import output_folder

    def model(kernel: Any, *positional: Any, **named: Any) -> ModelledCall:
        name = request.node.name
        given = bound_arguments(kernel, named or positional, name)
        call = model_call(kernel, given)
        bands = list(call.launches[0])
        us = {band: sum(r[band].modelled_us for r in call.launches) for band in bands}
        if folder := request.config.getoption("--nki-trace"):
            for number, launch in enumerate(call.launches):
                file = f"{name}_{number}_{launch['base'].launch.kernel}.json".replace("/", "_")
                save_timeline(launch["base"], output_folder(Path(folder)) / file)
        return ModelledCall(name, call, us, request.config.getoption("--nki-update"))

    return model
