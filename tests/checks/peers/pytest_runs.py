"""A pytest plugin that runs the tests of an nki-library checkout on the interpreter.

The tests stay as they are: their fixture `test_manager`, which compiles for a device and runs
there, is replaced by one that interprets the kernel and compares with the test's reference.
"""

import random
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from importlib import import_module
from typing import Any

from segattn.reference.extras import MissingExtraError
from segattn.tests.checks.peers.cases import Peer
from segattn.tests.checks.peers.modules import ALIAS_SUFFIX
from segattn.tests.checks.peers.results import (
    Comparison,
    PeerMismatchError,
    PeerResult,
    compare,
    run_kernel,
)

try:
    import pytest
except ModuleNotFoundError as error:
    raise MissingExtraError("pytest", "test") from error

_NEURON_CORES = {"TRN1": 1, "TRN2": 2}


class InterpreterOrchestrator:
    """Takes the place of nki-library's Orchestrator."""

    def __init__(self) -> None:
        self.comparison = Comparison()
        self.trace_mode: Any = None
        """Set by some tests for the device farm."""

    def execute(self, kernel_under_test: Any) -> None:
        """Run the kernel of a test and compare every output with its golden value."""
        compiler = kernel_under_test.compiler_input
        if compiler.platform_target.name not in _NEURON_CORES:
            pytest.skip(f"for {compiler.platform_target.value} only")
        inference = getattr(kernel_under_test, "inference_args", None)
        num_ranks = getattr(inference, "collective_ranks", 1)
        golden = kernel_under_test.validation_args.golden_output
        results = run_kernel(
            kernel_under_test.kernel_func,
            [_of_rank(kernel_under_test.kernel_input, rank) for rank in range(num_ranks)],
            compiler.logical_nc_config,
            self.comparison,
        )
        for rank, outputs in enumerate(results):
            self._compare(kernel_under_test.validation_args, _of_rank(golden, rank), outputs)

    def _compare(self, validation: Any, golden: Any, outputs: list[Any]) -> None:
        golden = getattr(golden, "golden", golden)
        if golden is None:
            return  # the kernel checks itself, or is only compiled by its test
        if len(outputs) < len(golden):
            raise PeerMismatchError(f"{len(outputs)} outputs for {list(golden)}")
        # A kernel may return more than its test looks at.
        for (name, expected), actual in zip(golden.items(), outputs, strict=False):
            if hasattr(expected, "validator"):
                flat = actual.reshape(-1).view("uint8")
                if not expected.validator(None).validate(flat):
                    raise PeerMismatchError(f"{name}: refused by the test's own validator")
            else:
                compare(
                    name,
                    actual,
                    expected,
                    validation.relative_accuracy,
                    validation.absolute_accuracy,
                    self.comparison,
                )


def _of_rank(value: Any, rank: int) -> Any:
    """Return the inputs or golden values of one rank; inputs lose their alias marks."""
    value = value.for_rank(rank) if hasattr(value, "for_rank") else value
    if isinstance(value, dict):
        return {name.removesuffix(ALIAS_SUFFIX): item for name, item in value.items()}
    return value


class PeerPlugin:
    """Fixtures, parametrisation and collection of results."""

    def __init__(self, peer: Peer, report: Callable[[PeerResult], None]) -> None:
        self.peer = peer
        self.report = report
        self.orchestrator = InterpreterOrchestrator()

    @pytest.fixture
    def test_manager(self) -> InterpreterOrchestrator:
        """Return the orchestrator that interprets."""
        self.orchestrator.comparison = Comparison()
        return self.orchestrator

    @pytest.fixture
    def platform_target(self) -> Any:
        """Return trn2, as nki-library names it."""
        return import_module("test.utils.common_dataclasses").Platforms.TRN2

    @pytest.fixture
    def collector(self) -> Any:
        """Return a collector of metrics that collects nothing."""
        return import_module("test.utils.metrics_collector").NoopMetricsCollector()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Expand nki-library's own ways to parametrise, valid combinations only."""
        if "range_test_options" in metafunc.fixturenames:
            self._expand_ranges(metafunc)
        else:
            self._expand_coverage(metafunc)

    def _expand_ranges(self, metafunc: pytest.Metafunc) -> None:
        harness = import_module("test.utils.ranged_test_harness")
        function = metafunc.function
        config = getattr(function, harness.RANGE_TEST_CONFIG_ATTR_KEY)
        limit = harness.RANGE_TEST_LIMIT_NUM_TESTS_ATTR_KEY
        options = {limit: getattr(function, limit)} if hasattr(function, limit) else {}
        random.seed(0)
        if not self.peer.may_select(function.__name__):
            metafunc.parametrize("range_test_options", [])
            return
        names, cases = harness.RangeTestHarness(config, **options).get_unique_test_cases()
        kept = [
            (name, case)
            for name, case in zip(names, cases, strict=True)
            if not case.is_negative_test_case
        ]
        metafunc.parametrize(
            "range_test_options", [case for _, case in kept], ids=[name for name, _ in kept]
        )

    def _expand_coverage(self, metafunc: pytest.Metafunc) -> None:
        marker = metafunc.definition.get_closest_marker("coverage_parametrize")
        if marker is None:
            return
        generator = import_module("test.utils.coverage_parametrized_tests")
        options = dict(marker.kwargs)
        coverage = options.pop("coverage", None) or "singles"
        filter_func = options.pop("filter", None)
        for name in ("n_tests_per_boundary_value", "max_invalid_tests"):
            options.pop(name, None)
        for name in ("enable_automatic_boundary_tests", "enable_invalid_combination_tests"):
            options.pop(name, None)
        random.seed(0)
        if not self.peer.may_select(metafunc.function.__name__):
            # Working out the cases takes minutes in some files.
            metafunc.parametrize([*options, "is_negative_test_case"], [])
            return
        cases = generator.generate_parametrized_test_case(
            params=options,
            coverage=coverage,
            filter_func=filter_func,
            enable_automatic_boundary_tests=False,
            enable_invalid_combination_tests=False,
        )
        metafunc.parametrize(*generator.extract_parametrize_args(options, cases)[:2])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the selected tests of trn2."""
        kept = []
        for item in items:
            platforms = item.get_closest_marker("platforms")
            excluded = platforms.kwargs.get("exclude", []) if platforms else []
            if self.peer.selects(item.name) and "TRN2" not in [
                platform.name for platform in excluded
            ]:
                kept.append(item)
                self._resize(item)
        items[:] = kept

    def _resize(self, item: pytest.Item) -> None:
        """Give a test the sizes of the table instead of its own."""
        sizes = self.peer.sizes
        if not sizes:
            return
        own: dict[str, Any] = vars(item)["callspec"].params
        changed = [name for name in sizes if name in own]
        own.update({name: sizes[name] for name in changed})
        for parameter, value in own.items():
            if is_dataclass(value) and not isinstance(value, type):
                names = [field.name for field in fields(value) if field.name in sizes]
                own[parameter] = replace(value, **{name: sizes[name] for name in names})
                changed += names
        for tensor in getattr(own.get("range_test_options"), "tensors", {}).values():
            names = [name for name in sizes if name in tensor]
            tensor.update({name: sizes[name] for name in names})
            changed += names
        if changed:
            item.name += " with " + ", ".join(f"{name}={sizes[name]}" for name in changed)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Report a test when it has run, or when its set-up failed."""
        outcome: pytest.TestReport = yield
        if outcome.when == "call" or (outcome.when == "setup" and not outcome.passed):
            reason = ""
            if call.excinfo is not None:
                text = str(call.excinfo.value).strip() or call.excinfo.typename
                reason = f"{call.excinfo.typename}: {text.splitlines()[0]}"
            comparison = self.orchestrator.comparison
            self.report(PeerResult(item.name, outcome.outcome, call.duration, comparison, reason))
        return outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Report files that cannot be imported."""
        if report.failed:
            reason = str(report.longrepr).strip().splitlines()[-1]
            self.report(PeerResult(report.nodeid, "failed", 0.0, Comparison(), reason))
