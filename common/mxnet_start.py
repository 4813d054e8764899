"""Makes `import mxnet` quick: MXNet 1.9.1's Python function for an operator is made at the operator's first call.

MXNet writes and compiles Python source for each of its 2,500 operators, and twice for operators of its NumPy interface.
This work takes half of the import time. A few modules of MXNet that no program here uses are loaded at their first use,
together with the slow packages that they import.

Only the programs of this project start MXNet in this way (`common.mxnet_compat`). Other programs get the hook from
site-packages, and keep the signatures and documentation of the operators.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

# (handle, MXNet's name of the operator, name of the Python function)
MakeOperator = Callable[[Any, str, str], Callable[..., Any]]
UNUSED = ("mxnet.contrib.onnx", "mxnet.contrib.text", "mxnet.contrib.quantization", "mxnet.onnx", "mxnet.test_utils",
          "requests")  # used for downloads


class _BaseLoader(SourceFileLoader):
    """Patches mxnet.base, whose functions register the operators of all modules."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name in ("_init_op_module", "_init_np_op_module"):
            setattr(module, name, _registering_later(getattr(module, name)))


def _registering_later(register: Callable[..., None]) -> Callable[..., None]:
    """MXNet's function that registers operators, changed to make each operator's function at its first call."""
    signature = inspect.signature(register)

    def changed(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        call.arguments["make_op_func"] = _later(call.arguments["make_op_func"])
        register(*call.args, **call.kwargs)

    return changed


def _later(make: MakeOperator) -> MakeOperator:
    def make_later(handle: Any, name: str, function_name: str) -> Callable[..., Any]:
        made: Callable[..., Any] | None = None

        def operator(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            if made is None:
                made = make(handle, name, function_name)
            return made(*args, **kwargs)

        operator.__name__ = function_name
        operator.__doc__ = f"MXNet's operator {name}; its arguments are in MXNet's documentation."
        return operator

    return make_later


LOADERS: dict[str, Callable[[str, str], Any]] = {
    "mxnet.base": _BaseLoader,
    **dict.fromkeys(UNUSED, importlib.util.LazyLoader.factory(SourceFileLoader)),  # type: ignore[arg-type]
}
