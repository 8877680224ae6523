"""A way into nki-library's MLP kernels where their entry point does not parse.

`core/mlp/mlp.py` of the public copy has an indentation error. It is not repaired: this module
takes its place for the tests and calls the kernels `mlp_cte` and `mlp_tkg`, which are unmodified.
"""

import ast
import inspect
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from segattn.reference import nki
from segattn.reference.nki import language as nl

_FOLDER = "nkilib_src.nkilib.core.mlp"
_UTILS = "nkilib_src.nkilib.core.utils"


def add_mlp_entry(root: Path) -> None:
    """Register the stand-in for `core/mlp/mlp.py` of a checkout, if that file does not parse."""
    path = root / "src" / Path(*_FOLDER.split(".")) / "mlp.py"
    if not path.is_file():
        return
    try:
        ast.parse(path.read_text())
    except SyntaxError:
        sys.modules[f"{_FOLDER}.mlp"] = _LazyEntry(f"{_FOLDER}.mlp")


class _LazyEntry(ModuleType):
    """Builds `mlp` when a test imports it: the library is importable only then."""

    def __getattr__(self, name: str) -> Any:
        if name != "mlp":
            raise AttributeError(name)
        entry = vars(self)["mlp"] = _entry()
        return entry


def _entry() -> Any:
    """Return a kernel with the parameters of MLPParameters that runs the kernel they ask for."""
    parameters = import_module(f"{_FOLDER}.mlp_parameters")
    prefill = import_module(f"{_FOLDER}.mlp_cte.mlp_cte").mlp_cte
    decode = import_module(f"{_FOLDER}.mlp_tkg.mlp_tkg").mlp_tkg
    allocator = import_module(f"{_UTILS}.allocator")
    logging = import_module(f"{_UTILS}.logging")
    own = list(inspect.signature(parameters.MLPParameters.__init__).parameters.values())[1:]

    names = [parameter.name for parameter in own]
    own.append(inspect.Parameter("sbm", inspect.Parameter.KEYWORD_ONLY, default=None))

    def mlp(*arguments: Any, **named: Any) -> Any:
        sbm = named.pop("sbm", None)
        given = dict(zip(names, arguments, strict=False))
        params = parameters.MLPParameters(**given, **named)
        parameters.validate_mlp_arguments(params)
        shape = (params.batch_size, params.sequence_len, params.hidden_size)
        count = 2 if parameters.mlpp_store_fused_add(params) else 1
        outputs: list[Any] = [None] if params.store_output_in_sbuf else []
        while len(outputs) < count:
            outputs.append(nl.ndarray(shape, dtype=params.output_dtype, buffer=nl.shared_hbm))
        stored_sum = outputs[1] if count == 2 else None
        if not parameters.is_mlp_tkg(params):
            prefill(params, outputs[0], stored_sum)
            return tuple(outputs)
        memory = sbm or allocator.SbufManager(0, 200 * 1024, logging.Logger("mlp"))
        return tuple(decode(params, outputs[0], stored_sum, sbm=memory))

    mlp.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]  # what inspect reads
    return nki.jit(mlp)
