"""Makes `import mxnet` quick: what MXNet 1.9.1 makes for all of its operators is made at their first call.

MXNet writes and compiles Python source for each of its 2,500 operators, twice for those of NumPy's interface, which
is half of the time of its import. A few modules that no program here uses, and the slow packages that they import, are
loaded at their first use.

Only our programs start MXNet in this way (`common.mxnet_compat`). Others, which get the hook from site-packages, keep
the signatures and documentation of the operators.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

MakeOperator = Callable[[Any, str, str], Callable[..., Any]]  # (handle, MXNet's name, name of the function)
UNUSED = ("mxnet.contrib.onnx", "mxnet.contrib.text", "mxnet.contrib.quantization", "mxnet.onnx", "mxnet.test_utils",
          "requests")  # for downloads


class _BaseLoader(SourceFileLoader):
    """For mxnet.base, whose functions register the operators of all modules."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for name in ("_init_op_module", "_init_np_op_module"):
            setattr(module, name, _registering_later(getattr(module, name)))


def _registering_later(register: Callable[..., None]) -> Callable[..., None]:
    """MXNet's function that registers operators, changed to make each at its first call."""
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
