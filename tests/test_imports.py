"""Who may import whom (docs/interfaces.md), read from the source, so that imports inside functions count too."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("train", "pipelines", "graph_passes", "common", "resnet_mxnet")
CUDA_LIBRARIES = {"cuda", "cudnn", "cupy", "torch"}
CUDA_PLACES = {Path("graph_passes/executors/cuda"), Path("pipelines/gpu.py")}


def imported(source: str) -> set[str]:
    """Top-level names of all modules that a source file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


def files(folder: str) -> list[Path]:
    found = sorted((REPOSITORY / folder).rglob("*.py"))
    assert found
    return found


def test_the_check_sees_imports_inside_functions() -> None:
    assert imported("def f():\n    import mxnet.nd as nd\n    from cuda.core import Device") == {"mxnet", "cuda"}


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "benchmarks", "scripts"])
def test_mxnet_comes_through_one_place(folder: str) -> None:
    assert [path for path in files(folder) if "mxnet" in imported(path.read_text())] == []


@pytest.mark.parametrize(
    ("package", "others"),
    [("common", {"train", "pipelines", "graph_passes"}), ("pipelines", {"train", "graph_passes"}),
     ("graph_passes", {"train", "pipelines"}), ("train", set())],
)
def test_packages_import_only_what_is_below_them(package: str, others: set[str]) -> None:
    forbidden = others | {"scripts", "tests", "benchmarks"}
    assert [path for path in files(package) if imported(path.read_text()) & forbidden] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_cuda_libraries_stay_in_the_cuda_executor_and_one_file_of_the_loader(package: str) -> None:
    outside = [path for path in files(package)
               if CUDA_PLACES.isdisjoint([inside := path.relative_to(REPOSITORY), *inside.parents])]
    assert [path for path in outside if imported(path.read_text()) & CUDA_LIBRARIES] == []


def test_mxnet_is_mended_for_programs_that_import_it_themselves(tmp_path: Path) -> None:
    """As horovodrun does: by the .pth file that the package puts into site-packages, editable or not. Where the project
    is gone, or another `common` is in front of it, Python starts as ever."""
    hook = (REPOSITORY / "common" / "mxnet_compat.pth").read_text()
    (tmp_path / "site" / "common").mkdir(parents=True)
    (tmp_path / "site" / "project.pth").write_text(f"{REPOSITORY}\n{hook}")
    folder = str(tmp_path / "site")
    start = (f"import site, sys; site.addsitedir({folder!r});"
             "print([type(finder).__name__ for finder in sys.meta_path].count('_MendBeforeMXNet'));"
             "print([name for name in sys.modules if name.split('.')[0] == 'common'])")
    for other, mended in (("", 1), ("common.py", 0), ("common/__init__.py", 0)):
        if other:
            (tmp_path / "site" / other).write_text("")
        found = subprocess.run([sys.executable, "-I", "-S", "-c", start], capture_output=True, text=True, check=False)
        assert (found.stdout, found.stderr) == (f"{mended}\n[]\n", "")


@pytest.mark.parametrize("given", [None, "3"])
def test_threads_of_mxnet_are_not_those_of_programs_started_from_it(given: str | None) -> None:
    """Four processes of 16 cores each had 64 threads each where a program that trains in them had imported MXNet."""
    program = ("import ctypes, os; from common.mxnet_compat import _num_compute_threads, mx; mx.nd.waitall();"
               "print(os.environ.get('OMP_NUM_THREADS'), ctypes.CDLL('libgomp.so.1').omp_get_max_threads(),"
               "      _num_compute_threads())")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    found = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True,
                           env=environment if given is None else environment | {"OMP_NUM_THREADS": given})
    left, threads, all_threads = found.stdout.split()
    assert (left, threads) == ((given, given) if given else ("None", all_threads))


def test_a_checkout_is_of_one_piece(tmp_path: Path) -> None:
    """In an environment that another one has made, too."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    imports = f"import {', '.join(PACKAGES)}; print(*(each.__file__ for each in ({', '.join(PACKAGES)})))"
    found = subprocess.run([sys.executable, "-c", imports], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(tmp_path / package / "__init__.py") for package in PACKAGES]


def test_benchmarks_find_what_they_import() -> None:
    """Most of them run on a GPU only, so no other test would notice. The peers need PyTorch."""
    programs = [path.stem for path in files("benchmarks") if "torch" not in imported(path.read_text())]
    command = [sys.executable, "-c", f"import {', '.join(programs)}"]
    result = subprocess.run(command, cwd=REPOSITORY / "benchmarks", capture_output=True, text=True, check=False)
    assert "bn_group" in programs and result.returncode == 0, result.stderr


def test_no_module_imports_in_a_circle() -> None:
    """Imports inside functions and for type checkers count too; `from package import module` imports the module."""
    modules = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
               for package in (*PACKAGES, "common") for path in files(package)}
    imports: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = imports.setdefault(module, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                found.update(name if name in modules else node.module for name in names)
        found &= modules.keys() - {module}
    assert len(imports) > 100
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, with the circle
