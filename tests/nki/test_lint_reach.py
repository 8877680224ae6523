"""The check before a run reaches all that a kernel can call, through whatever holds it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from segattn.reference import nki
from segattn.reference.nki.errors import NkiValidationError, NkiWarning
from segattn.reference.nki.lint import check_kernel

nl, nisa = nki.language, nki.isa


def bad(t: Any) -> None:
    numbers = [2 * i for i in range(3)]
    nisa.tensor_scalar(t, t, nl.add, float(numbers[1]))


def good(t: Any) -> None:
    nisa.tensor_scalar(t, t, nl.add, 1.0)


class Adder(nl.NKIObject):
    amount: int = 1
    dtype: Any = nl.float32  # as an array has

    def run(self, t: Any) -> None:
        bad(t)

    def unused(self) -> list[int]:
        return [2 * i for i in range(self.amount)]


class Plain:
    amount = 1


def kernel_with(function: Callable[..., None]) -> Any:
    @nki.jit
    def kernel(x: Any) -> Any:
        function(x)
        return x

    return kernel


@nki.jit
def argument_kernel(x: Any, f: Any) -> Any:
    t = nl.load(x)
    f(t)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(out, t)
    return out


@nki.jit
def object_kernel(x: Any, adder: Any) -> Any:
    adder.run(x)
    return x


@nki.jit
def ignoring_kernel(x: Any, adder: Any) -> Any:
    return x


TABLE = {"bad": [bad]}
PAIR = (good, partial(bad))
ADDER = Adder()


@nki.jit
def table_kernel(x: Any) -> Any:
    TABLE["bad"][0](x)
    return x


@nki.jit
def pair_kernel(x: Any) -> Any:
    PAIR[0](x)
    return x


@nki.jit
def global_object_kernel(x: Any) -> Any:
    ADDER.run(x)
    return x


module = ModuleType("module")
module.inner = ModuleType("inner")  # type: ignore[attr-defined]  # a package with a module
module.inner.bad = bad


@nki.jit
def module_kernel(x: Any) -> Any:
    module.inner.bad(x)
    return x


@nki.jit
def default_kernel(x: Any, f: Any = bad) -> Any:
    f(x)
    return x


def rules(kernel: Any, **arguments: Any) -> list[str]:
    return [item.rule for item in check_kernel(kernel.function, arguments) if item.kind.level == 1]


@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [
        (kernel_with(bad), {}),
        (kernel_with(partial(bad)), {}),
        (kernel_with(Adder().run), {}),
        (argument_kernel, {"f": bad}),
        (argument_kernel, {"f": partial(partial(bad))}),
        (argument_kernel, {"f": Adder().run}),
        (argument_kernel, {"f": (good, {"a": bad})}),
        (object_kernel, {"adder": Adder()}),
        (object_kernel, {"adder": (1, Adder())}),
        (table_kernel, {}),
        (pair_kernel, {}),
        (global_object_kernel, {}),
        (module_kernel, {}),
        (default_kernel, {}),
    ],
)
def test_functions_are_found_wherever_they_are_held(kernel: Any, arguments: dict[str, Any]) -> None:
    assert rules(kernel, **arguments) == ["comprehension"]


def test_right_functions_and_methods_that_nothing_names_are_no_findings() -> None:
    assert rules(kernel_with(good)) == []
    assert rules(argument_kernel, f=good) == []
    assert rules(ignoring_kernel, adder=Adder()) == []


def adds_a_set(t: Any) -> None:
    for amount in {1.0}:  # what the compiler refuses
        nisa.tensor_scalar(t, t, nl.add, amount)


def test_the_launch_refuses_what_an_argument_brings_and_takes_what_is_right() -> None:
    x = np.zeros((2, 4), np.float32)
    with nki.strict(subset="error"):
        with pytest.raises(NkiValidationError, match=r"\[set\].*\[rule subset\]"):
            argument_kernel(x.copy(), adds_a_set)
        np.testing.assert_array_equal(argument_kernel(x.copy(), good), x + 1)


def test_python_that_kernels_use_on_devices_runs_with_a_warning() -> None:
    x = np.zeros((2, 4), np.float32)
    with nki.strict(subset="error"):
        with pytest.warns(NkiWarning, match=r"\[comprehension\].*\[rule unlisted_python\]"):
            argument_kernel(x.copy(), bad)
        refused = pytest.raises(NkiValidationError, match="list comprehension")
        with nki.strict(unlisted_python="error"), refused:
            argument_kernel(x.copy(), bad)
        with nki.strict(subset="off"):
            argument_kernel(x.copy(), bad)


def test_lists_and_objects_of_plain_classes_are_no_arguments() -> None:
    assert rules(ignoring_kernel, adder=[1, 2]) == ["list-argument"]
    assert rules(ignoring_kernel, adder=(1, 2)) == []
    assert rules(ignoring_kernel, adder=Plain()) == ["class-base"]
    assert rules(ignoring_kernel, adder=Plain) == []
    assert rules(ignoring_kernel, adder=nl.float32) == []
    assert rules(ignoring_kernel, adder=np.dtype("float32")) == []


def test_a_redefined_helper_is_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules(module_kernel) == ["comprehension"]
    monkeypatch.setattr(module.inner, "bad", good)
    assert rules(module_kernel) == []
    monkeypatch.setitem(globals(), "ADDER", None)
    assert rules(global_object_kernel) == []


def test_names_that_a_running_module_gives_nki_are_known(tmp_path: Path) -> None:
    path = tmp_path / "aliased.py"
    path.write_text("def kernel(x):\n    return lang.load(x), lang.arange(4)\n")
    scope: dict[str, Any] = {"lang": nl, "__name__": "aliased"}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    assert [item.rule for item in check_kernel(scope["kernel"])] == ["removed-api"]
    scope["lang"] = None
    exec(compile("\n" + path.read_text(), str(path), "exec"), scope)
    assert check_kernel(scope["kernel"]) == ()  # the file is not what ran
