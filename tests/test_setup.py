"""scripts/setup.sh: which packages and Horovod a machine gets, with stand-ins for its tools; nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "setup.sh"
TOOLS = ("bash", "cat", "cksum", "dirname", "env", "grep", "gzip", "ln", "mkdir", "mv", "nproc", "realpath", "rm",
         "sed", "sort", "tail", "tar", "touch", "tr")  # of any Linux
GPU = 'echo "GPU 0: NVIDIA H200"'
# What is mended in Horovod's source, by file: what newer compilers refuse, and in the last one a pointer that is read
# after it was freed.
HOROVOD = {
    "horovod/common/common.h": 'void f() { throw std::logic_error(""); }\n',
    "horovod/common/group_table.h": "std::string name;\n",
    "third_party/gloo/gloo/types.h": "uint8_t kind;\n",
    "third_party/flatbuffers/include/flatbuffers/stl_emulation.h":
        "using size_type = int;\nstruct Span {\n  void set(int n) { count_ = n; }\n  const size_type count_;\n};\n",
    "horovod/mxnet/mpi_ops.cc": "#include <string>\nstruct Parameters { char** op_names; };\n"
                                "auto name(Parameters* ops_param) { return ops_param->op_names[0]; }\n"
}


def write_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def run_setup(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Runs setup.sh on a machine that has just the tools given, by name and what they do.

    Returns what it says, and a line for each call of pip: its arguments and Horovod's settings.
    """
    venv, log = tmp_path / "venv", tmp_path / "calls"
    (tmp_path / "nccl" / "lib").mkdir(parents=True)
    for name, text in HOROVOD.items():
        path = tmp_path / "horovod-0.28.1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with tarfile.open(tmp_path / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "horovod-0.28.1", "horovod-0.28.1")
    write_program(venv / "bin" / "pip", f'echo "$* $(env | grep ^HOROVOD_ | sort | tr "\\n" " ")" >>{log}\n'
                  f'[ $1 != download ] || mv {archive.name} {venv}')
    write_program(venv / "bin" / "python", f'case $1 in -c) echo {tmp_path}/nccl ;; -W) exit 1 ;; esac')

    def run(**tools: str) -> tuple[str, str]:
        path = tmp_path / "path"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        for name in TOOLS:
            (path / name).symlink_to(shutil.which(name) or name)
        for name, body in tools.items():
            write_program(path / name.replace("gxx", "g++").replace("_", "-"), body)
        log.write_text("")
        environment = {"PATH": str(path), "HOME": os.environ["HOME"], "CUDA_HOME": str(tmp_path / "cuda")}
        done = subprocess.run([path / "bash", SCRIPT, venv], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert (venv / ".ready").exists()
        return done.stdout, log.read_text()

    return run


def test_gpu_without_nvcc(run_setup):
    """One sentence, and all but Horovod is set up; once there is nvcc, only that is made up for."""
    said, calls = run_setup(nvidia_smi=GPU, gxx="")
    assert "setup: no nvcc, so no Horovod: everything but several GPUs works; install the CUDA toolkit" in said
    assert ".[gpu,onnx,dev]" in calls
    assert "uninstall -q -y mxnet \n" in calls
    assert "horovod" not in calls
    said, calls = run_setup(nvidia_smi=GPU, gxx="", nvcc="echo '#$ TOP=/opt/cuda' >&2")
    assert "horovod==0.28.1" in calls
    assert "--force-reinstall" in calls
    assert "[gpu" not in calls


def test_nvcc_beside_path(run_setup, tmp_path):
    """NVIDIA's installer leaves it to the user to add nvcc to PATH."""
    write_program(tmp_path / "cuda" / "bin" / "nvcc", "echo '#$ TOP=/opt/cuda' >&2")
    _, calls = run_setup(nvidia_smi=GPU, gxx="")
    assert "HOROVOD_CUDA_HOME=/opt/cuda " in calls


def test_gpu_with_nvcc(run_setup, tmp_path):
    said, calls = run_setup(nvidia_smi=GPU, gxx="", nvcc="echo '#$ TOP=/opt/cuda/bin/..' >&2")
    (horovod,) = (line for line in calls.splitlines() if "--force-reinstall" in line)
    for setting in ("HOROVOD_GPU_OPERATIONS=NCCL", "HOROVOD_CPU_OPERATIONS=GLOO", f"HOROVOD_NCCL_HOME={tmp_path}/nccl"):
        assert setting in horovod
    assert (tmp_path / "nccl" / "lib" / "libnccl.so").is_symlink()
    assert "allreduce.cc did not build" in said  # its stand-in fails, and the rest is none the worse
    _, calls = run_setup(nvidia_smi=GPU, gxx="", nvcc="")
    assert calls == ""  # all done


@pytest.mark.parametrize("nvidia_smi", ["exit 9", "echo 'No devices were found'"])
def test_no_gpu(run_setup, nvidia_smi):
    said, calls = run_setup(nvidia_smi=nvidia_smi, gxx="", nvcc="")
    assert "packages for a machine with no GPU" in said
    assert ".[cpu,onnx,dev]" in calls
    (horovod,) = (line for line in calls.splitlines() if "--force-reinstall" in line)
    assert "HOROVOD_GPU_OPERATIONS" not in horovod


def test_no_compiler(run_setup):
    said, calls = run_setup()
    assert "setup: no g++, so no Horovod: everything but several processes works" in said
    assert "horovod" not in calls


def test_horovod_does_not_build(run_setup, tmp_path):
    pip = tmp_path / "venv" / "bin" / "pip"
    with pip.open("a") as program:
        print("""[[ $* != *--force-reinstall* ]] || {
            echo "  error: subprocess-exited-with-error"
            echo "  | /build/common.h:343:18: error: 'logic_error' is not a member of 'std'"
            echo "  ERROR: Failed building wheel for horovod"
            exit 1
        }""", file=program)
    said, _ = run_setup(gxx="")
    log = tmp_path / "venv" / "setup-horovod.log"
    assert f"Horovod did not build: common.h:343:18: error: 'logic_error' is not a member of 'std' (log: {log})" in said
    assert "everything but several processes works" in said
    assert "ERROR: Failed building wheel" in log.read_text()


def test_no_source_of_horovod(run_setup, tmp_path):
    (tmp_path / "horovod-0.28.1.tar.gz").unlink()
    said, _ = run_setup(gxx="")
    assert f"setup: Horovod did not build: mv: cannot stat '{tmp_path}/horovod-0.28.1.tar.gz'" in said
    assert "everything but several processes works" in said


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++ here")
def test_source_of_horovod_is_mended(run_setup, tmp_path):
    """For compilers of today: what is used is included, what is assigned to is no constant. And a name is copied."""
    run_setup(gxx="")
    source = tmp_path / "venv" / "horovod-0.28.1"
    for name in HOROVOD:
        subprocess.run(["g++", "-fsyntax-only", "-x", "c++", source / name], check=True)
    assert "return std::string(ops_param->op_names[0])" in (source / "horovod/mxnet/mpi_ops.cc").read_text()


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "work" / "thesis.tex"
    precious.parent.mkdir()
    precious.write_text("years")
    found = subprocess.run(["bash", str(SCRIPT), str(precious.parent)], capture_output=True, text=True)
    assert found.returncode == 2 and precious.read_text() == "years"
    assert found.stderr == (f"error: {precious.parent} is there and is no virtual environment: remove it, or name "
                            "another place\n")
