"""The allowed imports between packages (docs/interfaces.md), read from the source, so that imports inside functions
count too."""

from __future__ import annotations

import ast
import graphlib
import importlib
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common import mxnet_hook

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("train", "gpu_report", "pipelines", "graph_passes", "common", "resnet_mxnet")
CUDA_LIBRARIES = {"cuda", "cudnn", "cupy", "torch"}
CUDA_PLACES = {Path("graph_passes/executors/cuda"), Path("pipelines/gpu.py")}


def imported(source: str) -> set[str]:
    """The top-level names of all modules that a source file imports."""
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
    [("common", {"train", "gpu_report", "pipelines", "graph_passes", "resnet_mxnet"}),
     ("pipelines", {"train", "gpu_report", "graph_passes", "resnet_mxnet"}),
     ("graph_passes", {"train", "gpu_report", "pipelines", "resnet_mxnet"}),
     ("train", {"gpu_report", "resnet_mxnet"}), ("gpu_report", {"resnet_mxnet"}), ("resnet_mxnet", {"gpu_report"})],
)
def test_packages_import_only_what_is_below_them(package: str, others: set[str]) -> None:
    forbidden = others | {"scripts", "tests", "benchmarks"}
    assert [path for path in files(package) if imported(path.read_text()) & forbidden] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_cuda_libraries_stay_in_the_cuda_executor_and_one_file_of_the_loader(package: str) -> None:
    outside = [path for path in files(package)
               if CUDA_PLACES.isdisjoint([inside := path.relative_to(REPOSITORY), *inside.parents])]
    assert [path for path in outside if imported(path.read_text()) & CUDA_LIBRARIES] == []


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The files that an installation puts into site-packages, and a stand-in for MXNet that prints what it finds."""
    site = tmp_path / "site"
    (site / "mxnet").mkdir(parents=True)
    shutil.copy(REPOSITORY / "common" / "mxnet_hook.pth", site / "resnet_mxnet_hook.pth")
    shutil.copy(REPOSITORY / "scripts" / "resnet_mxnet_hook.py", site)
    (site / "mxnet" / "__init__.py").write_text(
        "import numpy, sys\n"
        "print(*[finder.__module__ for finder in sys.meta_path if getattr(finder, '__name__', '') == 'MXNetHook'],\n"
        "      'bool' in vars(numpy), 'resnet_mxnet_hook' in sys.modules)\n")
    return site


def run_with(site: Path, program: str) -> str:
    """The output of a program that has this site-packages before its own."""
    start = f"import site, sys; site.addsitedir({str(site)!r}); sys.path.append({sysconfig.get_path('purelib')!r}); "
    done = subprocess.run([sys.executable, "-I", "-S", "-c", start + program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_mxnet_is_mended_for_programs_that_import_it_themselves(site: Path) -> None:
    """horovodrun is such a program; it does not import our modules first."""
    loaded = "print([name for name in sys.modules if name.startswith(('resnet', 'common', 'numpy'))]); "
    assert run_with(site, loaded + "import mxnet") == "[]\nresnet_mxnet_hook True True\n"


def test_whoever_looks_for_mxnet_changes_nothing(site: Path) -> None:
    look = "import importlib.util, os; importlib.util.find_spec('mxnet'); "
    assert run_with(site, look + "print('numpy' in sys.modules, 'OMP_NUM_THREADS' in os.environ)").startswith("False ")


def test_the_hook_of_the_checkout_takes_the_place_of_the_installed_one(site: Path) -> None:
    here = f"sys.path.insert(0, {str(REPOSITORY)!r}); "
    assert run_with(site, here + "from common.mxnet_compat import mx") == "common.mxnet_hook True False\n"
    late = "import mxnet; from common.mxnet_compat import mx; print(mx is mxnet)"
    assert run_with(site, here + late) == "resnet_mxnet_hook True True\nTrue\n"


def test_the_hook_runs_nothing_of_others(site: Path) -> None:
    (site / "common").mkdir()
    (site / "common" / "__init__.py").write_text("raise SystemExit('another common was imported')")
    assert run_with(site, "import mxnet") == "resnet_mxnet_hook True True\n"


def test_python_starts_without_the_hooks_module(site: Path) -> None:
    (site / "resnet_mxnet_hook.py").unlink()
    assert run_with(site, "print('started')") == "started\n"


def test_numpy_gets_back_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    numpy = types.ModuleType("numpy")
    left = ("bool_", "inf", "nan", "all", "any", "prod", "round", "sort", "isin", "ravel")
    vars(numpy).update({name: getattr(np, name) for name in left}, trapezoid=sum, rate="its own", NaN="its own")
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    mxnet_hook._mend_numpy()
    old: Any = numpy
    assert (old.bool, old.trapz, old.rate, old.NaN) == (np.bool_, sum, "its own", "its own")
    assert (old.NINF, old.PINF, math.copysign(1, old.NZERO)) == (-math.inf, math.inf, -1)
    assert (old.alltrue([1, 0]), old.sometrue([1, 0]), old.product([2, 3])) == (False, True, 6)
    assert old.round_(1.26, 1) == 1.3
    assert old.msort([[3, 1], [2, 4]]).tolist() == [[2, 1], [3, 4]]
    assert old.in1d([[1, 2], [3, 4]], [4, 1], invert=True).tolist() == [False, True, True, False]
    with pytest.raises(RuntimeError, match="install numpy-financial and call numpy_financial.pmt"):
        old.pmt(0.1, 2, 3)


def test_operators_of_mxnet_are_made_at_their_first_call() -> None:
    """MXNet would compile 2,500 functions at its import, and import slow packages that it hardly uses."""
    program = """if True:
        import sys
        from common.mxnet_compat import mx
        print(*{"onnx", "setuptools", "pkg_resources", "urllib3"} & sys.modules.keys())
        from mxnet.ndarray import register
        made, generate = [], register._generate_ndarray_function_code
        register._generate_ndarray_function_code = lambda handle, name, *args: (
            made.append(name), generate(handle, name, *args))[1]
        for _ in range(2):
            print(mx.nd.exp(mx.nd.relu(mx.nd.array([-1, 0]))).asnumpy().tolist(), made.count("relu"))
        print(*mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc").list_arguments())
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "\n[1.0, 1.0] 1\n[1.0, 1.0] 1\ndata fc_weight fc_bias\n", done.stderr


def test_rare_modules_of_mxnet_are_there_when_they_are_used() -> None:
    mx = importlib.import_module("common.mxnet_compat").mx
    assert mx.test_utils.almost_equal(np.ones(2), np.ones(2)) and callable(mx.contrib.quantization.quantize_model)


def test_records_with_several_labels() -> None:
    recordio = importlib.import_module("common.mxnet_compat").mx.recordio
    packed = recordio.pack(recordio.IRHeader(0, [1, 2.5], 3, 4), b"image")
    assert packed == struct.pack("<IfQQ2f", 2, 0, 3, 4, 1, 2.5) + b"image"


def test_mxnets_records_without_tostring(tmp_path: Path) -> None:
    """NumPy 2.3 removed `tostring`."""
    (tmp_path / "recordio.py").write_text("def pack(label):\n    return label.tostring()\n")
    names: dict[str, Any] = {}
    exec(mxnet_hook._RecordIOLoader("mxnet.recordio", str(tmp_path / "recordio.py")).get_code("mxnet.recordio"), names)
    assert names["pack"](np.array([1, 2], np.uint8)) == bytes([1, 2])


def test_mxnet_takes_tuples_with_numbers_of_numpy() -> None:
    """Since NumPy 2, the repr of a NumPy number contains its type."""
    mx = importlib.import_module("common.mxnet_compat").mx
    shape = (np.int64(2), np.int32(3))
    assert mx.nd.zeros(shape).shape == mx.nd.random.uniform(shape=shape).shape == (2, 3)
    assert mx.sym.zeros(shape).infer_shape()[1] == [(2, 3)]
    assert mxnet_hook._text((np.float32(0.1), "a", 1)) == "(0.1, 'a', 1)"


@pytest.mark.parametrize(("failing", "said"), [
    ("raise AttributeError('numpy has no gone')", r"MXNet cannot be imported with Python 3\.\S+ and NumPy \S+ "
                                                  r"\(numpy has no gone\): run make setup, .*"),
    ("import os; from os import gone", r"MXNet cannot be imported .*cannot import name 'gone' from 'os'.*"),
    ("import sys; sys.modules['requests'] = None; import requests.api",
     r"MXNet needs the package requests, .*-m pip install requests"),
    ("import sys; sys.modules['graphviz'] = None; import graphviz", ".*-m pip install 'graphviz<0.9'"),
    ("raise ModuleNotFoundError('No module named mxnet', name='mxnet')", ".* has no package mxnet: install .*"),
])
def test_why_mxnet_cannot_be_imported(tmp_path: Path, failing: str, said: str) -> None:
    (tmp_path / "mxnet.py").write_text(failing)
    program = ("from common.errors import ProgramError\ntry:\n    from common.mxnet_compat import mx\n"
               "except ProgramError as error:\n    print(error)")
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": f"{tmp_path}"})
    assert done.stderr == "" and re.fullmatch(said, done.stdout.strip())


@pytest.mark.parametrize("name, value, advice", [
    ("MXNET_ENGINE_TYPE", "Naive", "give NaiveEngine, ThreadedEngine or ThreadedEnginePerDevice, or unset it"),
    ("MXNET_CPU_WORKER_NTHREADS", "two", "give a whole number, or unset it"),
    ("OMP_NUM_THREADS", "two", "give a whole number from 1 to 1,024, or unset it"),
])
def test_what_mxnet_would_abort_of(name: str, value: str, advice: str) -> None:
    done = subprocess.run([sys.executable, "-m", "graph_passes", "show", "--model", "resnet18_v1"], cwd=REPOSITORY,
                          capture_output=True, text=True, env=os.environ | {name: value})
    assert (done.stderr, done.returncode) == (f"error: {name} is {value!r}: {advice}\n", 2)


@pytest.mark.long
@pytest.mark.parametrize("given", [None, "3"])
def test_threads_of_mxnet_are_not_those_of_programs_started_from_it(given: str | None) -> None:
    """Without the fix, a program that imported MXNet and trained in four processes of 16 cores each gave each process
    64 threads."""
    program = ("import ctypes, os; from common.mxnet_compat import mx, mxnet_hook; mx.nd.waitall();"
               "print(os.environ.get('OMP_NUM_THREADS'), ctypes.CDLL('libgomp.so.1').omp_get_max_threads(),"
               "      mxnet_hook.num_compute_threads())")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    found = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True,
                           env=environment if given is None else environment | {"OMP_NUM_THREADS": given})
    left, threads, all_threads = found.stdout.split()
    assert (left, threads) == ((given, given) if given else ("None", all_threads))


def test_a_checkout_is_of_one_piece(tmp_path: Path) -> None:
    """In an environment that another checkout has set up, all packages are imported from the current checkout."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    imports = f"import {', '.join(PACKAGES)}; print(*(each.__file__ for each in ({', '.join(PACKAGES)})))"
    found = subprocess.run([sys.executable, "-c", imports], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(tmp_path / package / "__init__.py") for package in PACKAGES]


def test_benchmarks_find_what_they_import() -> None:
    """Most of them only run on a GPU, so no other test would notice a missing import. The peers need PyTorch."""
    programs = [path.stem for path in files("benchmarks") if "torch" not in imported(path.read_text())]
    command = [sys.executable, "-c", f"import {', '.join(programs)}"]
    result = subprocess.run(command, cwd=REPOSITORY / "benchmarks", capture_output=True, text=True, check=False)
    assert "bn_group" in programs and result.returncode == 0, result.stderr


def imports_of_modules() -> dict[str, set[str]]:
    """The modules of ours that each module imports, including imports inside functions and for type checkers; `from
    package import module` imports the module."""
    modules = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
               for package in PACKAGES for path in files(package)}
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
    return imports


def test_no_module_imports_in_a_circle() -> None:
    graphlib.TopologicalSorter(imports_of_modules()).prepare()  # raises CycleError, with the circle


def test_no_folder_imports_in_a_circle() -> None:
    """A folder is one node of the graph; in a folder with sub-folders, each module is one node."""

    def node(module: str) -> str:
        place = REPOSITORY.joinpath(*module.split("."))
        folder = place if place.is_dir() else place.parent
        has_folders = any(path.is_dir() and path.name != "__pycache__" for path in folder.iterdir())
        return module if has_folders else folder.relative_to(REPOSITORY).as_posix()

    imports: dict[str, set[str]] = {}
    for module, found in imports_of_modules().items():
        imports.setdefault(node(module), set()).update({node(each) for each in found} - {node(module)})
    assert {"gpu_report", "train/recording", "train/report", "train.loop"} <= imports.keys()
    graphlib.TopologicalSorter(imports).prepare()
